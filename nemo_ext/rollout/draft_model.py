"""vLLM's draft model: where it is, how it is loaded into in place, and how its head stays apart from the target's.

Facts about vLLM that the code answers to, of 0.20.0, 0.25.1 and 0.32 unless a version is named:
- The V1 runner keeps it at `drafter.model`, the V2 runner at `speculator.model`.
- One load_weights call must bring all draft tensors: DSpark drops its confidence head in a call that has none.
- DFlash and DSpark allocate their fused key-value weights anew at each load, while a CUDA graph keeps reading the old.
- A head (or embedding) that is absent from the checkpoint, or equal to the target's when it is loaded, becomes the
  target's own module; a later load of the draft's then changes what the target computes.
- The EAGLE-3 loader does not notice a tensor that is missing from the checkpoint.
- 0.20.0 and 0.25.1 give every EAGLE-3 draft a `draft_id_to_target_id`, which a checkpoint of the whole vocabulary leaves
  at zero, the identity; 0.32 has none then.
"""

import copy
import re
from collections.abc import Iterable

import torch
from torch import nn

from nemo_ext.rollout.errors import RefreshError

# Hugging Face name of a tensor that vLLM may share with the target -> path of its module in the draft and the target.
SHAREABLE = {"lm_head.weight": "lm_head", "embed_tokens.weight": "model.embed_tokens"}
# Parameters that checkpoints may leave alone: every EAGLE-3 layer of vLLM has a hidden_norm, of which only the first
# one's is read; a DFlash mask embedding is read only where a file of its own brought it.
UNREAD = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.|mask_embedding$")
# Offsets from draft ids to target ids. A draft over the whole vocabulary has none in its checkpoint.
VOCABULARY_MAP = "draft_id_to_target_id"
UNWRITTEN_INT = torch.iinfo(torch.int64).min


def find_draft_model(worker) -> nn.Module | None:
    """The draft model of a vLLM worker, None where it does not speculate.

    Raises:
        RefreshError: it speculates, and neither runner version's place holds a model.
    """
    speculative = worker.vllm_config.speculative_config
    if speculative is None:
        return None
    for place in ("drafter", "speculator"):
        model = getattr(getattr(worker.model_runner, place, None), "model", None)
        if isinstance(model, nn.Module):
            return model
    raise RefreshError(
        f"speculative_config.method is {speculative.method} but the worker has no model at model_runner.drafter (V1) "
        "or model_runner.speculator (V2), so its weights cannot be refreshed; use a method with a draft model"
    )


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, None where there is none."""
    module = model
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def shared_modules(draft: nn.Module, target: nn.Module, names: Iterable[str]) -> list[str]:
    """Paths of the modules that hold one of `names` (unprefixed) in the draft and whose storage is the target's."""
    shared = []
    for path in (SHAREABLE[name] for name in names if name in SHAREABLE):
        mine, theirs = module_at(draft, path), module_at(target, path)
        if mine is not None and theirs is not None and mine.weight.data_ptr() == theirs.weight.data_ptr():
            shared.append(path)
    return shared


def unshare(draft: nn.Module, target: nn.Module, names: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Gives the draft modules of its own for the tensors that its checkpoint has; returns their paths.

    Must run before anything captures the draft's logits in a graph, which would go on reading the shared storage.

    Args:
        names: the draft checkpoint's tensor names, unprefixed.
        shapes: their shapes.

    Raises:
        RefreshError: the shared module has another number of rows than the checkpoint (a dummy load of a reduced
            vocabulary), so the private one cannot be had by copying.
    """
    paths = shared_modules(draft, target, names)
    for name, path in SHAREABLE.items():
        if path not in paths:
            continue
        parent = module_at(draft, path.rpartition(".")[0]) if "." in path else draft
        leaf = path.rpartition(".")[2]
        shared = getattr(parent, leaf)
        if shared.org_vocab_size != shapes[name][0]:
            raise RefreshError(
                f"draft.{name} has {shapes[name][0]} rows but the engine made it the target's, of "
                f"{shared.org_vocab_size}; set speculative_config.draft_load_config to {{'load_format': 'auto'}}"
            )
        setattr(parent, leaf, private_copy(shared))
    return paths


def check_reduced_vocabulary(draft: nn.Module, target: nn.Module) -> None:
    """A draft over fewer tokens than the target needs a head of its own; vLLM would draft noise with the target's.

    Raises:
        RefreshError: it has none.
    """
    rows = getattr(draft.config, "draft_vocab_size", None)
    head, target_head = module_at(draft, "lm_head"), module_at(target, "lm_head")
    if rows is not None and head is target_head and rows != head.org_vocab_size:
        raise RefreshError(
            f"draft_vocab_size is {rows} but the draft's folder has no lm_head.weight, and the target's head has "
            f"{head.org_vocab_size} rows; export the draft's head along with it"
        )


def private_copy(module: nn.Module) -> nn.Module:
    """A module with parameters of its own that loads and computes as the original does.

    copy.deepcopy would lose the attributes that vLLM puts on parameters (weight_loader, output_dim).
    """
    twin = copy.copy(module)
    twin._parameters = {}
    for name, parameter in module._parameters.items():
        if parameter is None:
            twin._parameters[name] = None
            continue
        own = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        for key, value in vars(parameter).items():
            bound_to_module = getattr(value, "__self__", None) is module
            setattr(own, key, value.__func__.__get__(twin) if bound_to_module else value)
        twin._parameters[name] = own
    return twin


def load_in_place(draft: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """One load_weights call; tensors that it derives and allocates anew are copied into where the old ones lay."""
    before = derived_tensors(draft)
    draft.load_weights(iter(tensors))
    for (module, attribute), new in derived_tensors(draft).items():
        old = before.get((module, attribute))
        if old is None or old.data_ptr() == new.data_ptr() or old.shape != new.shape:
            continue
        old.copy_(new)
        setattr(module, attribute, old)


def derived_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """All tensors that modules hold as plain attributes or buffers, by (module, attribute)."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if isinstance(value, torch.Tensor)
    }


def verify_loading(draft: nn.Module, target: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads the draft checkpoint over poisoned parameters: each element that is the draft's own must be written.

    Afterwards the draft holds that checkpoint. A vocabulary map that the checkpoint leaves alone keeps its value, which
    must be the identity.

    Raises:
        RefreshError: names the parameters that cannot be written, or that the checkpoint leaves as they were made.
    """
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    own = {
        name: parameter
        for name, parameter in draft.named_parameters()
        if (parameter.data_ptr() not in theirs or parameter.numel() == 0) and not UNREAD.search(name)
    }
    emptied = [name for name, parameter in own.items() if parameter.numel() == 0]
    if emptied:
        raise RefreshError(
            f"draft parameter {emptied[0]} was repacked and emptied when it was loaded; "
            "set worker_cls to nemo_ext.rollout.cpu_worker.RefreshableCPUWorker"
        )
    maps = {name: p for name, p in own.items() if name.endswith(VOCABULARY_MAP) and not p.any()}
    kept = {name: p.detach().clone() for name, p in maps.items()}
    for parameter in own.values():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNWRITTEN_INT)
    try:
        load_in_place(draft, tensors)
    finally:
        unwritten = {
            name
            for name, p in own.items()
            if (p.isnan().any() if p.is_floating_point() else (p == UNWRITTEN_INT).any())
        }
        for name in unwritten & kept.keys():
            own[name].data.copy_(kept[name])
    unwritten -= {name for name, p in maps.items() if len(p) == draft.config.vocab_size}
    if unwritten:
        raise RefreshError(
            f"the draft checkpoint leaves {', '.join(sorted(unwritten))} without a value; export it whole"
        )
