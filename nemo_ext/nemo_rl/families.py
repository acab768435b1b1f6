"""Which policy families the pinned engines draft for. The documentation's table is made from it:

python -m nemo_ext.nemo_rl.families

Every kind of draft here reads hidden states of the policy's layers, which vLLM hands out by its EAGLE-3 interface alone
(`SupportsEagle3`, asked for by EAGLE-3, DFlash and DSpark alike). What is listed is held against the engines' own source
by tests/upstream/test_engine_families.py. An architecture that is not listed is accepted: where the engine cannot serve
it, vLLM says so when it starts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_ext.nemo_rl.support import LIMITS, MAIN, V070, VERSIONS

ENGINES = {V070: "vLLM 0.20.0", MAIN: "vLLM 0.25.1"}
KINDS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}


@dataclass(frozen=True)
class Family:
    """Policies that the engines treat alike.

    Attributes:
        name: in the table.
        architectures: of the Hugging Face config, with the `model_type` of its text part, by which vLLM 0.20.0 chooses.
        taps: versions of NeMo-RL whose engine hands hidden states to drafts.
        latent: has latent attention (MLA).
        multimodal: lays out its rows by itself, so that it is refused before the engine is asked.
    """

    name: str
    architectures: dict[str, str]
    taps: tuple[str, ...] = VERSIONS
    latent: bool = False
    multimodal: bool = False

    def blocked(self, kind: str, version: str) -> str | None:
        """Key into `WHY`, the first that a run is told; None where a draft of this kind trains and is served."""
        if any(one.feature == KINDS[kind] and version in one.versions for one in LIMITS):
            return "kind"
        if self.multimodal:
            return "multimodal"
        if version not in self.taps:
            return "taps"
        if kind == "dflash" and self.latent and version == V070:
            return "latent"
        return None


FAMILIES = (
    Family("Llama 3", {"LlamaForCausalLM": "llama"}),
    Family("Qwen2.5", {"Qwen2ForCausalLM": "qwen2"}),
    Family("Qwen3", {"Qwen3ForCausalLM": "qwen3"}),
    Family("Qwen3 with experts", {"Qwen3MoeForCausalLM": "qwen3_moe"}),
    Family("gpt-oss", {"GptOssForCausalLM": "gpt_oss"}),
    Family("DeepSeek-V3, Moonlight", {"DeepseekV3ForCausalLM": "deepseek_v3"}, latent=True),
    Family("GLM-5", {"GlmMoeDsaForCausalLM": "glm_moe_dsa"}, (MAIN,), latent=True),
    Family("GLM-4.7-Flash", {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}, (), latent=True),
    Family("Nemotron Nano v2, Nemotron 3 Nano and Super", {"NemotronHForCausalLM": "nemotron_h"}, (MAIN,)),
    Family("Qwen3-Next", {"Qwen3NextForCausalLM": "qwen3_next"}, (MAIN,)),
    Family(
        "Qwen3.5, as published",
        {"Qwen3_5ForConditionalGeneration": "qwen3_5_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text"},
        multimodal=True,
    ),
    Family(
        "Qwen3.5, its text model alone",
        {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"},
        (),
    ),
    Family("Mistral", {"MistralForCausalLM": "mistral"}, (MAIN,)),
    Family("Phi-4-mini", {"Phi3ForCausalLM": "phi3"}, (MAIN,)),
    Family("MiniMax-M2", {"MiniMaxM2ForCausalLM": "minimax_m2"}),
    Family("Gemma 3, text", {"Gemma3ForCausalLM": "gemma3_text"}, ()),
)

# What stands in the way, in the order of the table's notes.
WHY = {
    "kind": "the vLLM of v0.7.0 does not serve DSpark",
    "multimodal": "multimodal: the policy lays out its rows by itself",
    "taps": "the version's vLLM hands no hidden states of this architecture to drafts, or does not know it",
    "latent": "the vLLM of v0.7.0 wants non-causal attention in the policy's layers too, and has none that is latent (MLA)",
}


def refusal(architectures: Iterable[str] | None, kind: str, version: str | None) -> str | None:
    """The error's line for a policy that the version's engine does not draft for; None if it does, or is not known to.

    Args:
        architectures: of the policy's Hugging Face config.
        kind: `policy.draft.speculator_type`.
        version: of NeMo-RL; None if it is not known, which is not held against a run.
    """
    found = [(family, name) for name in architectures or () for family in FAMILIES if name in family.architectures]
    if not found or version is None:
        return None
    family, name = found[0]
    engine = f"{ENGINES[version]}, the engine of NeMo-RL {version},"
    why = family.blocked(kind, version)
    others = [f"NeMo-RL {one} ({ENGINES[one]})" for one in VERSIONS if family.blocked(kind, one) is None]
    instead = f"use {' or '.join(others)}, or " if others else ""
    if why == "taps":
        return (
            f"policy.model_name is of the architecture {name}, whose hidden states {engine} does not hand to drafts; "
            f"{instead}set policy.draft.enabled to false"
        )
    if why == "latent":
        return (
            f"policy.draft.speculator_type is {kind}, for which {engine} wants non-causal attention in the policy's layers "
            f"too, and {name} has latent attention, which has none; {instead}set eagle3"
        )
    return None


def table() -> str:
    """Policy family x kind of draft x version, in Markdown, with its notes."""
    notes = {why: f"<sup>{number}</sup>" for number, why in enumerate(WHY, 1)}
    columns = [(version, kind) for version in VERSIONS for kind in KINDS]
    short = {V070: V070, MAIN: "main"}
    rows = [
        f"| policy | architecture | {' | '.join(f'{short[version]}: {KINDS[kind]}' for version, kind in columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for family in FAMILIES:
        cells = [family.blocked(kind, version) for version, kind in columns]
        told = " | ".join("yes" if why is None else f"no{notes[why]}" for why in cells)
        names = ", ".join(f"`{name}`" for name in family.architectures)
        rows.append(f"| {family.name} | {names} | {told} |")
    return "\n".join([*rows, "", *(f"{notes[why]} {told}.  " for why, told in WHY.items())])


if __name__ == "__main__":
    print(table())
