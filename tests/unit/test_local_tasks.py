"""Tasks, tokenizer and the GRPO loss of the CPU run."""

import pytest
import torch

from nemo_ext.config import ConfigError
from nemo_ext.local.advantages import advantages
from nemo_ext.local.tasks import Tasks
from nemo_ext.local.tokenizer import Codec, load_tokenizer, make_tokenizer

FAMILIES = [("spell_backward", 3.0, {"max_word_len": 8}), ("chain_sum", 1.0, {"max_terms": 2, "max_digits": 2})]


@pytest.fixture(scope="module")
def problems():
    return Tasks(FAMILIES, seed=1).problems("tokenizer", 0, 200)


def test_problems_follow_from_seed_stream_and_number():
    again = Tasks(FAMILIES, seed=1)
    assert Tasks(FAMILIES, seed=1).problems("train", 0, 9)[5:] == again.problems("train", 5, 4)
    assert again.problems("train", 0, 9) != again.problems("warmup", 0, 9)
    assert again.problems("train", 0, 9) != Tasks(FAMILIES, seed=2).problems("train", 0, 9)


def test_every_batch_holds_the_mixture():
    families = [p.family for p in Tasks(FAMILIES, seed=1).problems("train", 996, 8)]
    assert families.count(1) == 2


def test_reward_is_the_familys_own_verifier(problems):
    tasks = Tasks(FAMILIES, seed=1)
    for problem in problems[:8]:
        assert tasks.reward(problem, problem.answer) == 1.0
        assert tasks.reward(problem, "no") < 1.0


def test_tokenizer_has_the_asked_size_keeps_text_and_splits_what_varies(problems, tmp_path):
    tokenizer = make_tokenizer([p.question for p in problems], 320)
    assert len(tokenizer) == 320
    tokenizer.save_pretrained(tmp_path)
    codec = Codec(load_tokenizer(tmp_path))
    for problem in problems[:20]:
        assert codec.text(codec.prompt(problem.question)) == problem.question
        answer = codec.answer(problem.answer)
        assert codec.text(answer) == problem.answer and answer[-1] == codec.end_id
        assert len(answer) == len(problem.answer) + 1  # a token per character
    assert len(codec.prompt(problems[0].question)) < len(problems[0].question) / 2


def test_a_vocabulary_that_is_too_small_is_refused(problems):
    with pytest.raises(ConfigError, match="policy.model.vocab_size is 100; these tasks need at least"):
        make_tokenizer([p.question for p in problems], 100)


def test_advantages():
    plain = advantages([[1.0, 0.0], [0.5, 0.5]], normalize=False, leave_one_out=False)
    assert plain == [[0.5, -0.5], [0.0, 0.0]]
    others = advantages([[1.0, 0.0, 0.0]], normalize=False, leave_one_out=True)
    assert others == [[1.0, -0.5, -0.5]]
    scaled = torch.tensor(advantages([[1.0, 0.0, 0.3]], normalize=True, leave_one_out=False)[0])
    torch.testing.assert_close(scaled.std(), torch.tensor(1.0), atol=1e-4, rtol=0)
