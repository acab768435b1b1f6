"""Policy weights between Megatron's `GPTModel` and Hugging Face's Qwen3 names, both ways, bit by bit."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_ext.local.hf_shards import QKV, Columns, GateUp, VocabRows, Whole


@dataclass(frozen=True)
class Unit:
    """One Megatron parameter: its path (layers numbered over the whole model), its cut, its Hugging Face tensors."""

    path: str
    cut: Whole | VocabRows | Columns | GateUp | QKV
    shapes: dict[str, tuple[int, ...]]


def policy_units(hf_config: dict) -> list[Unit]:
    """Every parameter of the policy, in the order of a forward pass.

    A tied LM head is the embedding and has no unit of its own, as it has no tensor of its own in a Hugging Face folder.
    """
    hidden, ffn, vocab = hf_config["hidden_size"], hf_config["intermediate_size"], hf_config["vocab_size"]
    heads, groups = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    head_dim = hf_config.get("head_dim") or hidden // heads

    units = [Unit("embedding.word_embeddings", VocabRows(vocab), {"model.embed_tokens.weight": (vocab, hidden)})]
    for index in range(hf_config["num_hidden_layers"]):
        path, name = f"layers.{index}.", f"model.layers.{index}."
        qkv = {
            f"{name}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{name}self_attn.k_proj.weight": (groups * head_dim, hidden),
            f"{name}self_attn.v_proj.weight": (groups * head_dim, hidden),
        }
        gate_up = {f"{name}mlp.gate_proj.weight": (ffn, hidden), f"{name}mlp.up_proj.weight": (ffn, hidden)}
        units += [
            Unit(f"{path}input_layernorm", Whole(), {f"{name}input_layernorm.weight": (hidden,)}),
            Unit(f"{path}self_attention.linear_qkv", QKV(groups, heads // groups, head_dim), qkv),
            Unit(f"{path}self_attention.q_layernorm", Whole(), {f"{name}self_attn.q_norm.weight": (head_dim,)}),
            Unit(f"{path}self_attention.k_layernorm", Whole(), {f"{name}self_attn.k_norm.weight": (head_dim,)}),
            Unit(
                f"{path}self_attention.linear_proj",
                Columns(),
                {f"{name}self_attn.o_proj.weight": (hidden, heads * head_dim)},
            ),
            Unit(f"{path}pre_mlp_layernorm", Whole(), {f"{name}post_attention_layernorm.weight": (hidden,)}),
            Unit(f"{path}mlp.linear_fc1", GateUp(), gate_up),
            Unit(f"{path}mlp.linear_fc2", Columns(), {f"{name}mlp.down_proj.weight": (hidden, ffn)}),
        ]
    units.append(Unit("final_layernorm", Whole(), {"model.norm.weight": (hidden,)}))
    if not hf_config.get("tie_word_embeddings", False):
        units.append(Unit("output_layer", VocabRows(vocab), {"lm_head.weight": (vocab, hidden)}))
    return units


def policy_shapes(hf_config: dict) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the policy's Hugging Face checkpoint, by name."""
    return {name: shape for unit in policy_units(hf_config) for name, shape in unit.shapes.items()}


def _unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The `GPTModel` inside Megatron's DDP, if it is wrapped."""
    return chunk.module if hasattr(chunk, "module") else chunk


def _local_parameters(model_chunks: Iterable[torch.nn.Module]) -> dict[str, list[torch.nn.Parameter]]:
    """This rank's parameters by `Unit.path`: two where a tied embedding is also the last stage's head."""
    found: dict[str, list[torch.nn.Parameter]] = {}

    def add(path: str, module: torch.nn.Module) -> None:
        if module.weight is not None:
            found.setdefault(path, []).append(module.weight)

    for model in map(_unwrap, model_chunks):
        if model.pre_process:
            add("embedding.word_embeddings", model.embedding.word_embeddings)
        for layer in model.decoder.layers:
            for name, _ in layer.named_parameters():
                path = name.removesuffix(".weight")
                add(f"layers.{layer.layer_number - 1}.{path}", layer.get_submodule(path))
        if model.post_process:
            add("final_layernorm", model.decoder.final_layernorm)
            tied = model.share_embeddings_and_output_weights
            add("embedding.word_embeddings" if tied else "output_layer", model.output_layer)
    return found


@torch.no_grad()
def load_policy(
    model_chunks: Iterable[torch.nn.Module],
    hf_config: dict,
    tensors: Mapping[str, torch.Tensor],
    groups: ProcessGroupCollection,
) -> None:
    """Fills this rank's parameters from the full Hugging Face tensors, cast to the parameters' type.

    After this an optimizer with main parameters (bf16) needs its `reload_model_params()`. Raises ValueError that names
    the first missing, extra or misshaped tensor; nothing is changed then.
    """
    check_policy_tensors(hf_config, tensors)
    parameters = _local_parameters(model_chunks)
    for unit in policy_units(hf_config):
        for parameter in parameters.get(unit.path, ()):
            full = [tensors[name] for name in unit.shapes]
            parameter.copy_(unit.cut.shard(full, groups.tp.size(), groups.tp.rank()))


def check_policy_tensors(hf_config: dict, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless `tensors` are exactly the policy's, by name and shape."""
    shapes = policy_shapes(hf_config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"the policy checkpoint has no tensor {name}, which its config.json asks for")
        found = tuple(tensors[name].shape)
        if found != shape:
            raise ValueError(f"policy tensor {name} has shape {found}; its config.json gives {shape}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise ValueError(f"the policy checkpoint has a tensor {extra[0]}, which its config.json does not ask for")


@torch.no_grad()
def export_policy(
    model_chunks: Iterable[torch.nn.Module], hf_config: dict, groups: ProcessGroupCollection
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the policy as (Hugging Face name, full unpadded CPU tensor of its own storage).

    Collective over TP and PP: every rank must exhaust it, and every rank gets every tensor (gathered over TP, sent from
    the stage that holds it to the others), so any rank can save, digest or stream them.
    """
    parameters = _local_parameters(model_chunks)
    units = policy_units(hf_config)
    dtype = next(iter(parameters.values()))[0].dtype

    owners = torch.tensor([groups.pp.rank() if unit.path in parameters else -1 for unit in units])
    torch.distributed.all_reduce(owners, op=torch.distributed.ReduceOp.MAX, group=groups.pp)

    for unit, owner in zip(units, owners.tolist(), strict=True):
        if owner == groups.pp.rank():
            tensors = unit.cut.merge(_gather(parameters[unit.path][0].detach(), groups.tp))
        else:
            tensors = [torch.empty(shape, dtype=dtype) for shape in unit.shapes.values()]
        for name, tensor in zip(unit.shapes, tensors, strict=True):
            tensor = tensor.cpu().clone(memory_format=torch.contiguous_format)
            if groups.pp.size() > 1:
                torch.distributed.broadcast(_as_bytes(tensor), group_src=owner, group=groups.pp)
            yield name, tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: gloo moves those whatever the type."""
    return tensor.view(-1).view(torch.uint8)


def _gather(shard: torch.Tensor, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    """The shards of all ranks of `group`, in rank order."""
    shard = shard.contiguous()
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    torch.distributed.all_gather([_as_bytes(part) for part in shards], _as_bytes(shard), group=group)
    return shards


def init_policy(hf_config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Initial weights as full float32 Hugging Face tensors, the same for every parallel layout.

    Norms are 1; everything else is normal with the configuration's `initializer_range`, drawn in the order of
    `policy_shapes` from one generator seeded with `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation = hf_config.get("initializer_range", 0.02)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * deviation
        for name, shape in policy_shapes(hf_config).items()
    }


def policy_digest(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over name, shape and bytes of every tensor, in sorted order of names; hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dict(tensors).items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
