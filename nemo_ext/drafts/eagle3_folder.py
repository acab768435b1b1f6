"""Whether an EAGLE-3 draft folder fits a policy and the YAML: read from `config.json` and the tensors' headers alone.

Everything that would fail later, or worse would train and serve two different drafts without a word, is told here.
"""

from collections.abc import Iterator
from pathlib import Path

from nemo_ext.config import ConfigError, DraftConfig, nearest, show
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.folder import CONFIG, WEIGHTS, number_lines, read_parts, refused
from nemo_ext.drafts.safetensors_header import TensorEntry, read_int64

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# The names under which vLLM serves this very model (a Llama-like layer without query and key norms).
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
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


def check_draft_folder(folder: str | Path, policy: dict, draft: DraftConfig, *, max_length: int) -> Eagle3Config:
    """The shape of the draft in `folder`, if it fits.

    Args:
        folder: `policy.draft.model_name`, a Hugging Face folder with one safetensors file.
        policy: the policy's Hugging Face config.
        draft: what the YAML says; what it leaves null follows the checkpoint.
        max_length: longest sequence of the run, in tokens.

    Raises:
        ConfigError: a line for everything that does not fit.
    """
    folder = Path(folder)
    config, entries = _read(folder)
    lines = list(_config_lines(config, max_length))
    if not lines:
        try:
            shape = Eagle3Config.from_hf(config)
        except ConfigError as error:
            lines = [line.removeprefix("policy.draft.model_name: ") for line in error.lines]
    if lines:
        raise refused(folder, lines)
    lines = [*_policy_lines(config, shape, policy), *_tensor_lines(shape, entries, folder / WEIGHTS)]
    yaml_lines = list(_yaml_lines(shape, draft, folder))
    if lines or yaml_lines:
        raise ConfigError(*yaml_lines, *refused(folder, lines).lines)
    return shape


def eagle3_shapes(shape: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Shape of every floating-point tensor of the checkpoint by name (`layers.0.` for `midlayer.`)."""
    hidden, ffn, taps = shape.hidden_size, shape.intermediate_size, len(shape.tap_layers)
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    if shape.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(taps)}
    if shape.norm_before_fc:
        shapes["input_norm.weight"] = (taps * hidden,)
    for index in range(shape.num_layers):
        at = f"layers.{index}."
        inputs = hidden if index else 2 * hidden
        shapes |= {
            at + "self_attn.q_proj.weight": (q, inputs),
            at + "self_attn.k_proj.weight": (kv, inputs),
            at + "self_attn.v_proj.weight": (kv, inputs),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "mlp.gate_proj.weight": (ffn, hidden),
            at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (shape.draft_vocab_size, hidden)}


def rope_type(config: dict) -> str:
    """How a Hugging Face config scales rotary positions; `default` is not at all."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _read(folder: Path) -> tuple[dict, dict[str, TensorEntry]]:
    if not folder.is_dir():
        raise refused(folder, ["no such folder; give a local Hugging Face folder, or null for a fresh draft"])
    if not (folder / CONFIG).is_file():
        raise refused(folder, [f"it has no {CONFIG}; give a Hugging Face folder"])
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise refused(folder, [f"{pickles[0]} is a pickle, which can run code; convert it to {WEIGHTS}"])
        raise refused(folder, [f"it has no {WEIGHTS}; save the draft as one safetensors file"])
    return read_parts(folder)


def _config_lines(config: dict, max_length: int) -> Iterator[str]:
    """What stands in the way of reading the config, or asks for what the trainer cannot express."""
    yield from number_lines(config, _NEEDED)
    architectures = config.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        yield f"architectures is {architectures} in {CONFIG}; an EAGLE-3 draft here is {' or '.join(ARCHITECTURES)}"
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in plain.items():
        if config.get(key, value) != value:
            yield f"{key} is {show(config[key])} in {CONFIG}; the trainer has {show(value)} only"
    if rope_type(config) != "default":
        yield f"rope_type is {rope_type(config)} in {CONFIG}; the trainer has default only"
    eagle = config.get("eagle_config") or {}
    ids = [place.get("eagle_aux_hidden_state_layer_ids") for place in (config, eagle)]
    if all(ids) and ids[0] != ids[1]:
        yield (
            f"eagle_aux_hidden_state_layer_ids is {ids[0]} in {CONFIG} and {ids[1]} in its eagle_config; "
            "vLLM reads both, so make them equal"
        )
    if eagle.get("use_aux_hidden_state") is False:
        yield f"use_aux_hidden_state is false in {CONFIG}; the trainer has drafts over taps only"
    taps = ids[0] or ids[1]
    if taps and config.get("num_aux_hidden_states", len(taps)) != len(taps):
        yield f"num_aux_hidden_states is {config['num_aux_hidden_states']} in {CONFIG}; {len(taps)} layers are tapped"
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < max_length:
        yield (
            f"max_position_embeddings is {positions} in {CONFIG}, less than the run's {max_length} tokens; "
            "vLLM would clamp positions there, so write the policy's value"
        )


def _policy_lines(config: dict, shape: Eagle3Config, policy: dict) -> Iterator[str]:
    """What does not fit the policy."""
    hidden = policy["hidden_size"]
    if shape.hidden_size != hidden:
        yield f"hidden_size is {shape.hidden_size}, the policy's is {hidden}; a draft here is as wide as its policy"
    elif config.get("target_hidden_size", hidden) != hidden:
        yield f"target_hidden_size is {config['target_hidden_size']}, the policy's hidden_size is {hidden}"
    if shape.vocab_size != policy["vocab_size"]:
        yield f"vocab_size is {shape.vocab_size}, the policy's is {policy['vocab_size']}; the draft is another policy's"
    if shape.draft_vocab_size > shape.vocab_size:
        yield f"draft_vocab_size is {shape.draft_vocab_size}, more than vocab_size {shape.vocab_size}"
    layers, ids = policy["num_hidden_layers"], [layer + 1 for layer in shape.tap_layers]
    if ids[-1] > layers:
        yield (
            f"eagle_aux_hidden_state_layer_ids is {ids}, but the policy has {layers} layers; "
            f"the highest id is {layers} (id n is the output of layer n - 1)"
        )


def _yaml_lines(shape: Eagle3Config, draft: DraftConfig, folder: Path) -> Iterator[str]:
    """Where the YAML contradicts the checkpoint. Its nulls follow the checkpoint, but for `norm_output`."""
    pairs = {
        "num_layers": (draft.num_layers, shape.num_layers),
        "aux_layer_indices": (draft.aux_layer_indices, list(shape.tap_layers)),
        "draft_vocab_size": (draft.draft_vocab_size, shape.draft_vocab_size),
        "norm_output": (draft.norm_output, shape.norm_output),
        "norm_before_residual": (draft.norm_before_residual, shape.norm_before_residual),
        "fc_norm": (draft.fc_norm, shape.fc_norm),
    }
    for key, (said, is_) in pairs.items():
        if said is not None and said != is_:
            yield (
                f"policy.draft.{key} is {show(said)} but the draft in {folder} has {show(is_)}; "
                f"set {show(is_)} or null, or use another draft"
            )
    if shape.norm_output and draft.norm_output is None:
        # SpecForge writes the same key for "norm before the head": such a draft would be served unlike
        # it was trained.
        yield (
            f"policy.draft.norm_output is null but the draft in {folder} says true, which vLLM takes as 'feed back the "
            "normed hidden state'; set true if that is how it was trained, else correct its config.json"
        )


def _tensor_lines(shape: Eagle3Config, entries: dict[str, TensorEntry], file: Path) -> Iterator[str]:
    """Missing, misshaped and surplus tensors."""
    if any(name.startswith("model.") for name in entries):
        yield "tensor names begin with 'model.', which vLLM refuses; save them without it"
        return
    given = {name.replace("midlayer.", "layers.0.", 1): entry for name, entry in entries.items()}
    expected = eagle3_shapes(shape)
    for name, want in expected.items():
        entry = given.pop(name, None)
        if entry is None:
            yield f"tensor {name} is missing" + (_HEAD if name == "lm_head.weight" else "")
        elif entry.shape != want:
            yield f"tensor {name} has shape {list(entry.shape)}; by {CONFIG} it must be {list(want)}"
        elif entry.dtype not in _FLOATS:
            yield f"tensor {name} is {entry.dtype}; it must be one of {', '.join(_FLOATS)}"
    if shape.reduced_vocab:
        given.pop("t2d", None)
        yield from _vocabulary_lines(shape, given.pop("d2t", None), file)
    if given.pop("embed_tokens.weight", None) is not None:
        yield (
            "tensor embed_tokens.weight would be served instead of the policy's embedding, which the draft is trained "
            "on; remove it"
        )
    for name in sorted(given):
        yield f"tensor {name} is not part of this draft; {nearest(name, expected, 'its tensors are')}"


_HEAD = "; without it vLLM serves the policy's head, and a trained draft has its own"


def _vocabulary_lines(shape: Eagle3Config, entry: TensorEntry | None, file: Path) -> Iterator[str]:
    """The map from draft to policy ids: without a right one vLLM serves a useless draft without a word."""
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
