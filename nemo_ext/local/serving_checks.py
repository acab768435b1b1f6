"""What vLLM's CPU engine cannot serve of a draft, and what it serves otherwise than one may expect."""

from collections.abc import Iterator

from nemo_ext.config import DraftConfig
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.kinds import Shape
from nemo_ext.local.settings import SpeculativeConfig


def serving_lines(draft: DraftConfig, shape: Shape, speculative: SpeculativeConfig | None) -> Iterator[str]:
    """What it cannot serve."""
    if not isinstance(shape, BlockConfig):
        return
    if len(set(shape.layer_types)) > 1:
        yield (
            f"policy.draft.model_name is {draft.model_name}: layer_types is {list(shape.layer_types)}; vLLM serves a "
            "mixture on GPUs only, so use a draft whose layers are all of one type"
        )
    if speculative and speculative.num_speculative_tokens > shape.gamma:
        yield (
            "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens is "
            f"{speculative.num_speculative_tokens}, but a block of this draft has {shape.gamma} tokens "
            f"(policy.draft.gamma); set {shape.gamma} or less"
        )


def serving_notes(draft: DraftConfig, speculative: SpeculativeConfig | None) -> Iterator[str]:
    """What it serves otherwise; of a checked `policy.draft`."""
    if speculative is None:
        return
    tokens = f"speculative_config.num_speculative_tokens is {speculative.num_speculative_tokens}, policy.draft."
    if draft.speculator_type == "eagle3" and speculative.num_speculative_tokens > draft.ttt_steps:
        yield (
            f"{tokens}ttt_steps is {draft.ttt_steps}: later tokens of a chain are drafted at depths that the draft was not "
            "trained for"
        )
    if draft.speculator_type != "eagle3" and speculative.num_speculative_tokens < draft.gamma:
        yield f"{tokens}gamma is {draft.gamma}: vLLM makes blocks smaller than those that the draft is trained on"
