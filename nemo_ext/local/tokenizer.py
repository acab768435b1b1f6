"""A small byte-level tokenizer made from the tasks' own questions, saved as a Hugging Face folder.

Words that stand in nearly every question become one token each; digits and letters of the varying part stay single,
so that a tiny model can compute with them.
"""

from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_ext.config import ConfigError

END = "<|end|>"
PAD = "<|pad|>"
ANSWER = "<|answer|>"  # between question and answer
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}" + ANSWER


def make_tokenizer(questions: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Makes the vocabulary from `questions`: special tokens, all bytes, the words that a tenth of the questions share,
    and unused tokens up to exactly `vocab_size`. Raises ConfigError if it does not hold the first three.

    A unigram model, because it has whole words beside single characters and no pieces in between that would eat
    parts of the words to compute with, as merges would.
    """
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    counts = Counter(word for q in questions for word in {piece for piece, _ in split.pre_tokenize_str(q)})
    words = sorted(word for word, count in counts.items() if len(word) > 2 and count >= len(questions) / 10)
    special, alphabet = [END, PAD, ANSWER], sorted(pre_tokenizers.ByteLevel.alphabet())
    missing = vocab_size - len(special) - len(alphabet) - len(words)
    if missing < 0:
        raise ConfigError(
            f"policy.model.vocab_size is {vocab_size}; these tasks need at least {vocab_size - missing} "
            "(special tokens, bytes and common words)"
        )
    unused = [f"<|unused_{i}|>" for i in range(missing)]
    pieces = [(piece, -10.0) for piece in special + alphabet] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces + [(piece, -100.0) for piece in unused], unk_id=1))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special + unused)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=_TEMPLATE,
        model_input_names=["input_ids"],
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, ours or another. Raises ConfigError without tokenizer files or a chat
    template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"policy.model_name is {folder}: its tokenizer does not load ({str(error).splitlines()[0]}); "
            "give a folder with tokenizer.json and tokenizer_config.json"
        ) from None
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise ConfigError(
            f"policy.model_name is {folder}: its tokenizer has no chat template or no end token; give a chat model's"
        )
    return tokenizer


class Codec:
    """Questions and answers as token ids, and responses back as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self.end_id = tokenizer.eos_token_id

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def answer(self, answer: str) -> list[int]:
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self.end_id]

    def text(self, ids: list[int]) -> str:
        """The response's text, without the end token."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
