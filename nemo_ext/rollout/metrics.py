"""Accept statistics of speculative decoding, from the difference of two readings of vLLM's counters."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class AcceptStats:
    """What verification did over a stretch of generation.

    Attributes:
        drafts: verifications, one for each request and step that had proposed tokens.
        draft_tokens: tokens proposed.
        accepted_tokens: of them, accepted.
        accepted_per_position: accepted at each depth, first depth first.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per verification, the bonus token included: 1 + accepted / drafts."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed tokens."""
        return self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of verifications that accepted the token at each depth (and hence all before it)."""
        return [accepted / self.drafts for accepted in self.accepted_per_position]


def read_counters(metrics: Iterable) -> AcceptStats | None:
    """The running counters among the result of vLLM's `llm.get_metrics()`; None without speculation."""
    counts: Counter[str] = Counter()
    per_position: Counter[int] = Counter()
    for metric in metrics:
        if not metric.name.startswith(PREFIX):
            continue
        name = metric.name.removeprefix(PREFIX)
        # One entry a label set (engine); their sum is wanted.
        if name == "accepted_tokens_per_pos":
            per_position.update(dict(enumerate(metric.values)))
        else:
            counts[name] += metric.value
    if not per_position:
        return None
    return AcceptStats(
        drafts=counts["drafts"],
        draft_tokens=counts["draft_tokens"],
        accepted_tokens=counts["accepted_tokens"],
        accepted_per_position=tuple(per_position[i] for i in range(len(per_position))),
    )


def stats_between(before: AcceptStats | None, after: AcceptStats | None) -> AcceptStats | None:
    """What happened between two readings; None without speculation, or when nothing was verified."""
    if before is None or after is None or after.drafts == before.drafts:
        return None
    return AcceptStats(
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        accepted_per_position=tuple(
            b - a for a, b in zip(before.accepted_per_position, after.accepted_per_position, strict=True)
        ),
    )
