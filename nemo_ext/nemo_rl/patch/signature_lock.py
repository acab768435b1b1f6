"""The lock of a pinned version: signatures of what is overridden or called, and small functions whose code is counted on.

It is read off the source, so that it can be held against a checkout without an environment in which upstream imports;
`tests/upstream/test_drift.py` holds it against the imported functions. A checkout passes if each entry is that of any
pinned version: one code base serves all of them.
"""

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nemo_ext.nemo_rl.patch import source
from nemo_ext.nemo_rl.patch.source import NotFound, Source

LOCK = "lock.json"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl"
EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend:VllmInternalWorkerExtension"
DATA = "nemo_rl.distributed.batched_data_dict:BatchedDataDict"
MEGATRON_DATA = "nemo_rl.models.megatron.data"
NAMES = (
    f"{WORKER}.__init__",
    f"{WORKER}.train",
    f"{WORKER}.save_checkpoint",
    f"{WORKER}.move_model",
    f"{WORKER}.move_optimizer",
    f"{WORKER}._iter_params_with_optional_kv_scales",
    f"{DATA}.get_batch",
    f"{DATA}.make_microbatch_iterator",
    f"{DATA}.make_microbatch_iterator_for_packable_sequences",
    f"{DATA}.make_microbatch_iterator_with_dynamic_shapes",
    f"{DATA}.get_microbatch_iterator_for_packable_sequences_len",
    f"{MEGATRON_DATA}:_get_pack_sequence_parameters_for_megatron",
    "nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker",
    "nemo_rl.models.policy.utils:resolve_policy_worker_cls",
    "nemo_rl.algorithms.grpo:setup",
    f"{EXTENSION}.prepare_refit_info",
    f"{EXTENSION}.update_weights_via_ipc_zmq",
    f"{EXTENSION}.update_weights_from_collective",
    f"{EXTENSION}._load_weights",
)
# Whose code must be that of a pinned version: the draft's rows are laid out by the same rules as theirs, and nothing
# later would tell the difference.
BODIES = (
    f"{DATA}.get_batch",
    f"{DATA}.make_microbatch_iterator",
    f"{DATA}.make_microbatch_iterator_for_packable_sequences",
    f"{DATA}.make_microbatch_iterator_with_dynamic_shapes",
    f"{DATA}.get_microbatch_iterator_for_packable_sequences_len",
    f"{MEGATRON_DATA}:_get_pack_sequence_parameters_for_megatron",
    f"{MEGATRON_DATA}:get_microbatch_iterator",
    f"{EXTENSION}.prepare_refit_info",
    f"{WORKER}.move_optimizer",
)
# Settings whose names are locked, so that a new one is told of.
SETTINGS = (
    "nemo_rl.models.policy:PolicyConfig",
    "nemo_rl.models.policy:MegatronConfig",
    "nemo_rl.models.policy:SequencePackingConfig",
    "nemo_rl.models.policy:DynamicBatchingConfig",
    "nemo_rl.models.generation.vllm.config:VllmConfig",
    "nemo_rl.models.generation.vllm.config:VllmSpecificArgs",
)
# Decorators that hand arguments and results on.
_TRANSPARENT = {"wrap_with_nvtx_name", "torch.no_grad", "abstractmethod", "staticmethod", "classmethod"}
_TOLD = {"staticmethod", "classmethod"}


def lock_of(checkout: Source) -> dict:
    """The lock that fits a checkout. Raises NotFound for anything that is not there."""
    return {
        "signatures": {name: signature(checkout.find(name)) for name in NAMES},
        "bodies": {name: source.tree_digest(checkout.find(name)) for name in BODIES},
        "settings": {
            name: sorted(source.tree_digest(ast.Name(field)) for field in fields(checkout, name)) for name in SETTINGS
        },
        "draft_readers": draft_readers(checkout),
    }


def read_lock(folder: Path) -> dict | None:
    """The lock of a pinned version's folder; None for one without."""
    file = folder / LOCK
    return json.loads(file.read_text()) if file.is_file() else None


def changes(checkout: Source, locks: Sequence[dict]) -> Iterator[str]:
    """A line for each thing that is not as in any of these locks."""
    yield from _held(checkout, NAMES, [lock["signatures"] for lock in locks], signature, _signature_line)
    yield from _held(
        checkout,
        BODIES,
        [lock["bodies"] for lock in locks],
        source.tree_digest,
        lambda name, known, now: f"{_short(name)}: its code is none that a pinned version has",
    )
    for reader, times in draft_readers(checkout).items():
        known = max(lock["draft_readers"].get(reader, 0) for lock in locks)
        if times > known:
            yield f"{reader} has the key draft {times} times, and at most {known} in a pinned version"


def _held(
    checkout: Source,
    names: Sequence[str],
    locked: Sequence[dict[str, str]],
    told: Callable[[ast.stmt], str],
    line: Callable[[str, list[str], str], str],
) -> Iterator[str]:
    for name in names:
        known = [lock[name] for lock in locked if name in lock]
        try:
            now = told(checkout.find(name))
        except NotFound as error:
            yield f"{_short(name)}: {error}"
            continue
        if now not in known:
            yield line(name, known, now)


def new_settings(checkout: Source, locks: Sequence[dict]) -> Iterator[str]:
    """Settings that no pinned version has, like `PolicyConfig.draft`. Most do no harm, and nobody has looked."""
    for name in SETTINGS:
        known = {digest for lock in locks for digest in lock["settings"].get(name, ())}
        try:
            found = fields(checkout, name)
        except NotFound:
            continue
        yield from (f"{_short(name)}.{field}" for field in found if source.tree_digest(ast.Name(field)) not in known)


def signature(node: ast.stmt) -> str:
    """Names, kinds and whether there is a default, like `self, data, mbs=, *, gbs=, **kwargs`. Annotations may be
    written in several ways.

    Raises NotFound for what is no plain function.
    """
    if not isinstance(node, ast.FunctionDef):
        raise NotFound(f"{getattr(node, 'name', 'it')} is no plain function")
    decorators = [source.dotted_name(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    unknown = [one for one in decorators if one not in _TRANSPARENT]
    if unknown:
        raise NotFound(
            f"{node.name} is decorated with {unknown[0] or 'an expression'}, which is not known to be harmless"
        )
    told = node.args
    positional = [*told.posonlyargs, *told.args]
    defaults = [False] * (len(positional) - len(told.defaults)) + [True] * len(told.defaults)
    parts = [one.arg + "=" * given for one, given in zip(positional, defaults, strict=True)]
    if told.posonlyargs:
        parts.insert(len(told.posonlyargs), "/")
    if told.vararg:
        parts.append("*" + told.vararg.arg)
    elif told.kwonlyargs:
        parts.append("*")
    parts += [one.arg + "=" * (value is not None) for one, value in zip(told.kwonlyargs, told.kw_defaults, strict=True)]
    if told.kwarg:
        parts.append("**" + told.kwarg.arg)
    return "".join(f"@{one} " for one in decorators if one in _TOLD) + ", ".join(parts)


def _signature_line(name: str, known: list[str], now: str) -> str:
    """What is new and what is gone, against the nearest of the known ones."""
    if not known:
        return f"{_short(name)}: no pinned version has it"
    new = now.split(", ")
    nearest = min((one.split(", ") for one in known), key=lambda one: len(set(one) ^ set(new)))
    gained, lost = ([one for one in a if one not in b] for a, b in ((new, nearest), (nearest, new)))
    parts = [f"has gained {', '.join(gained)}"] * bool(gained) + [f"has lost {', '.join(lost)}"] * bool(lost)
    return f"{_short(name)}: it {' and '.join(parts) or 'has its parameters in another order'}"


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def fields(checkout: Source, name: str) -> list[str]:
    """The annotated fields of a class."""
    return [
        statement.target.id
        for statement in checkout.find(name).body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def draft_readers(checkout: Source) -> dict[str, int]:
    """How often each function has the key `draft`, like `nemo_rl.models.policy.lm_policy:Policy.__init__`. Whoever looks
    up `policy.draft` may hold upstream's own limits against our drafts."""
    found = {}
    for file in sorted((checkout.root / "nemo_rl").rglob("*.py")):
        path = file.relative_to(checkout.root)
        text = checkout.read(path.as_posix())
        if b'"draft"' in text or b"'draft'" in text:
            dotted = ".".join(path.with_suffix("").parts)
            found |= {f"{dotted}:{path}": count for path, count in _keys(source.parse(text, dotted), "").items()}
    return found


def _keys(node: ast.AST, path: str) -> Counter[str]:
    """How often the string `draft` stands in each definition below `node`."""
    found: Counter[str] = Counter()
    for child in ast.iter_child_nodes(node):
        found[path] += isinstance(child, ast.Constant) and child.value == "draft"
        inside = f"{path}.{child.name}".lstrip(".") if isinstance(child, source.DEFINITIONS) else path
        found += _keys(child, inside)
    return +found
