"""Whether a block-draft folder fits a policy and the YAML: read from `config.json` and the tensors' headers alone.

The folder may be in any form that `block_formats` knows. Everything that would fail later, or worse would train and serve
two different drafts without a word, is told here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_ext.config import ConfigError, nearest, show
from nemo_ext.drafts.block_config import BlockConfig
from nemo_ext.drafts.block_formats import vllm_form, vllm_names
from nemo_ext.drafts.block_shapes import block_shapes
from nemo_ext.drafts.folder import CONFIG, WEIGHTS, number_lines, read_parts, refused
from nemo_ext.drafts.safetensors_header import TensorEntry, read_int64

MASK_EMBEDDING = "mask_embedding.pt"
_FLOATS = ("F32", "BF16", "F16")
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Settings that vLLM has and the trainer has one value of.
_PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "is_neox_style": True,
    "use_aux_hidden_state": True,
    "add_swa_attention_sink_bias": False,
}
_PLAIN_DFLASH: dict[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
}


def check_block_folder(folder: str | Path, policy: dict, draft, *, max_length: int) -> BlockConfig:
    """The shape of the draft in `folder`, if it fits.

    Args:
        folder: `policy.draft.model_name`, a Hugging Face folder with one safetensors file.
        policy: the policy's Hugging Face config.
        draft: `policy.draft`: its `speculator_type`, `num_layers`, `aux_layer_indices`, `draft_vocab_size`, `gamma`,
            `mask_token_id`, `sliding_window` and `markov_rank`; what is null follows the checkpoint.
        max_length: longest sequence of the run, in tokens.

    Raises:
        ConfigError: a line for everything that does not fit.
    """
    folder = Path(folder)
    raw, entries = _read(folder)
    try:
        config = vllm_form(raw)
        lines = list(_config_lines(config, max_length))
        shape = None if lines else BlockConfig.from_hf(config)
    except ConfigError as error:
        lines, shape = [line.removeprefix("policy.draft.model_name: ") for line in error.lines], None
    if (folder / MASK_EMBEDDING).exists():
        lines.append(
            f"{MASK_EMBEDDING} would be served instead of the policy's embedding of the mask token, which the draft is "
            "trained on; remove it"
        )
    if shape is None:
        raise refused(folder, lines)
    lines += [*_policy_lines(config, shape, policy), *_tensor_lines(shape, entries, folder / WEIGHTS)]
    yaml_lines = list(_yaml_lines(shape, draft, folder))
    if lines or yaml_lines:
        raise ConfigError(*yaml_lines, *refused(folder, lines).lines)
    return shape


def _read(folder: Path) -> tuple[dict, dict[str, TensorEntry]]:
    if not folder.is_dir():
        raise refused(folder, ["no such folder; give a local Hugging Face folder, or null for a fresh draft"])
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise refused(folder, [f"it has no {name}; give a Hugging Face folder with one safetensors file"])
    return read_parts(folder)


def _config_lines(config: dict, max_length: int) -> Iterator[str]:
    """What stands in the way of reading the config, or asks for what the trainer cannot express."""
    yield from number_lines(config, _NEEDED)
    dflash = config.get("dflash_config") or {}
    for section, plain in ((config, _PLAIN), (dflash, _PLAIN_DFLASH)):
        at = "dflash_config." if section is dflash else ""
        for key, value in plain.items():
            if section.get(key, value) != value:
                yield f"{at}{key} is {show(section[key])} in {CONFIG}; the trainer has {show(value)} only"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        yield f"rope_type is {kind} in {CONFIG}; the trainer has default only"
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < max_length:
        yield (
            f"max_position_embeddings is {positions} in {CONFIG}, less than the run's {max_length} tokens; "
            "write the policy's value"
        )


def _policy_lines(config: dict, shape: BlockConfig, policy: dict) -> Iterator[str]:
    """What does not fit the policy, whose embedding and head the draft is used with."""
    hidden = policy["hidden_size"]
    if shape.hidden_size != hidden:
        yield f"hidden_size is {shape.hidden_size}, the policy's is {hidden}; a draft here is as wide as its policy"
    elif (config.get("target_hidden_size") or hidden) != hidden:
        yield f"target_hidden_size is {config['target_hidden_size']}, the policy's hidden_size is {hidden}"
    if shape.vocab_size != policy["vocab_size"]:
        yield f"vocab_size is {shape.vocab_size}, the policy's is {policy['vocab_size']}; the draft is another policy's"
    if shape.draft_vocab_size > shape.vocab_size:
        yield f"draft_vocab_size is {shape.draft_vocab_size}, more than vocab_size {shape.vocab_size}"
    layers = policy["num_hidden_layers"]
    if shape.tap_layers[-1] >= layers:
        yield (
            f"target_layer_ids is {list(shape.tap_layers)}, but the policy has {layers} layers; "
            f"the highest id is {layers - 1} (id l is the output of layer l, from 0)"
        )


def _yaml_lines(shape: BlockConfig, draft, folder: Path) -> Iterator[str]:
    """Where the YAML contradicts the checkpoint. Its nulls follow the checkpoint."""
    if draft.speculator_type != shape.kind:
        yield (
            f"policy.draft.speculator_type is {draft.speculator_type} but the draft in {folder} is {shape.kind}; "
            "set that, or use another draft"
        )
        return
    pairs = {
        "num_layers": (draft.num_layers, shape.num_layers),
        "aux_layer_indices": (draft.aux_layer_indices, list(shape.tap_layers)),
        "draft_vocab_size": (draft.draft_vocab_size, shape.draft_vocab_size),
        "mask_token_id": (draft.mask_token_id, shape.mask_token_id),
        "sliding_window": (draft.sliding_window, shape.sliding_window),
    }
    if shape.kind == "dspark":
        pairs["markov_rank"] = (draft.markov_rank, shape.markov_rank)
    for key, (said, is_) in pairs.items():
        if said is not None and said != is_:
            yield (
                f"policy.draft.{key} is {show(said)} but the draft in {folder} has {show(is_)}; "
                f"set {show(is_)} or null, or use another draft"
            )
    if draft.gamma is not None and draft.gamma != shape.gamma:
        yield (
            f"policy.draft.gamma is {draft.gamma} but the draft in {folder} has block_size {shape.block_size}, which "
            f"drafts {shape.gamma} tokens; set {shape.gamma} or null, or use another draft"
        )


def _tensor_lines(shape: BlockConfig, entries: dict[str, TensorEntry], file: Path) -> Iterator[str]:
    """Missing, misshaped and surplus tensors."""
    if any(name.startswith("model.") for name in entries):
        yield "tensor names begin with 'model.', which vLLM refuses; save them without it"
        return
    given = {known: entries[name] for name, known in vllm_names(shape, entries).items()}
    expected = block_shapes(shape)
    offsets = given.pop("d2t", None)
    for name, want in expected.items():
        entry = given.pop(name, None)
        if entry is None:
            yield f"tensor {name} is missing"
        elif entry.shape != want:
            yield f"tensor {name} has shape {list(entry.shape)}; by {CONFIG} it must be {list(want)}"
        elif entry.dtype not in _FLOATS:
            yield f"tensor {name} is {entry.dtype}; it must be one of {', '.join(_FLOATS)}"
    for name in sorted(given):
        yield f"tensor {name} is not part of this draft; {nearest(name, expected, 'its tensors are')}"
    if shape.reduced_vocab:
        yield from _vocabulary_lines(shape, offsets, file)


def _vocabulary_lines(shape: BlockConfig, entry: TensorEntry | None, file: Path) -> Iterator[str]:
    """The map from draft to policy ids."""
    size, vocab = shape.draft_vocab_size, shape.vocab_size
    if entry is None:
        yield f"tensor d2t is missing, though draft_vocab_size {size} is not vocab_size {vocab}"
        return
    if entry.dtype != "I64" or entry.shape != (size,):
        yield f"tensor d2t is {entry.dtype} {list(entry.shape)}; it must be I64 [{size}], offsets to the policy's ids"
        return
    ids = read_int64(file, entry) + range(size)
    outside = ((ids < 0) | (ids >= vocab)).nonzero()[0]
    if len(outside):
        yield (
            f"tensor d2t maps draft token {outside[0]} to {ids[outside[0]]}, outside the policy's {vocab} tokens; "
            "d2t is an offset: policy id = draft id + d2t"
        )
    elif len(set(ids.tolist())) != size:
        yield "tensor d2t maps two draft tokens to one policy token; d2t is an offset: policy id = draft id + d2t"
