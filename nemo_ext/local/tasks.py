"""reasoning-gym tasks: questions, worked answers for the warm-up, and verified rewards."""

from dataclasses import dataclass

import reasoning_gym


@dataclass(frozen=True)
class Problem:
    """One question, numbered within its task family."""

    family: int
    question: str
    answer: str
    entry: dict


class Tasks:
    """An endless, seeded mixture of task families.

    Args:
        families: `(name, weight, config)` of each reasoning-gym dataset.
        seed: the whole stream follows from it.

    Problem `n` of a `stream` is a function of (seed, stream, n) alone, so that a resumed run draws what it would
    have drawn, and warm-up and RL (other streams) see other problems.
    """

    def __init__(self, families: list[tuple[str, float, dict]], seed: int):
        self._families = families
        self._seed = seed
        self._datasets: dict[tuple[str, int], object] = {}
        total = sum(weight for _, weight, _ in families)
        self._shares = [weight / total for _, weight, _ in families]

    def problems(self, stream: str, start: int, count: int) -> list[Problem]:
        return [self._problem(stream, index) for index in range(start, start + count)]

    def _problem(self, stream: str, index: int) -> Problem:
        family = self._family(index)
        entry = self._dataset(stream, family)[index]
        return Problem(family, entry["question"], entry["answer"], entry)

    def _family(self, index: int) -> int:
        """Families take turns in proportion to their weights (largest deficit first), so every batch holds the mixture."""
        position, counts = index % 1000, [0] * len(self._shares)
        for taken in range(position + 1):
            pick = max(range(len(counts)), key=lambda f: self._shares[f] * (taken + 1) - counts[f])
            counts[pick] += 1
        return pick

    def _dataset(self, stream: str, family: int):
        key = (stream, family)
        if key not in self._datasets:
            name, _, config = self._families[family]
            offset = {"warmup": 1, "train": 2, "validation": 3, "tokenizer": 4}[stream]
            self._datasets[key] = reasoning_gym.create_dataset(
                name, seed=self._seed * 8 + offset, size=2**31 - 1, **config
            )
        return self._datasets[key]

    def reward(self, problem: Problem, response: str) -> float:
        """The family's own verifier, in [0, 1]."""
        return float(self._dataset("train", problem.family).score_answer(response, problem.entry))
