"""A small byte-level tokenizer made from the tasks' own questions, saved as a Hugging Face folder.

Words that stand in nearly every question become one token each; digits and letters of the varying part stay single,
so that a tiny model can compute with them.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
ANSWER = "<|answer|>"  # between question and answer
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}" + ANSWER


def make_tokenizer(questions: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains on `questions`; the vocabulary is filled up to exactly `vocab_size` with unused tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=len(questions) // 3,
        special_tokens=[END, PAD, ANSWER],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(questions, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{i}|>" for i in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=_TEMPLATE, model_input_names=["input_ids"]
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


class Codec:
    """Questions and answers as token ids, and responses back as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self.end_id = tokenizer.convert_tokens_to_ids(END)
        self._answer_id = tokenizer.convert_tokens_to_ids(ANSWER)

    def prompt(self, question: str) -> list[int]:
        return [*self._tokenizer.encode(question, add_special_tokens=False), self._answer_id]

    def answer(self, answer: str) -> list[int]:
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self.end_id]

    def text(self, ids: list[int]) -> str:
        """The response's text, without the end token."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
