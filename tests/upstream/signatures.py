"""Signatures as Python sees them when upstream is imported, in the form of the package's own lock, which is read off the
source."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stub_modules import StubFinder

from nemo_ext.nemo_rl.patch.signature_lock import NAMES, read_lock
from nemo_ext.nemo_rl.patch_set import patch_sets


def signatures() -> dict[str, str | None]:
    """Each signature; None where there is no such thing."""
    with without_vllm():
        return {name: _told(name) for name in NAMES}


@contextmanager
def without_vllm() -> Iterator[None]:
    """Meanwhile files that import vLLM at their top can be imported."""
    finder = StubFinder(["vllm"])
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def changed() -> list[str]:
    """Names whose signature is not that of any pinned version."""
    locks = [read_lock(patches.folder)["signatures"] for patches in patch_sets()]
    return [name for name, told in signatures().items() if told not in {lock.get(name) for lock in locks}]


def _told(name: str) -> str | None:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        return None
    parameters = [
        one
        for one in inspect.signature(_undecorated(found, path.rpartition(".")[2])).parameters.values()
        if one.name != "_ray_trace_ctx"  # Ray's, in every class that it has made an actor of
    ]
    parts = []
    for index, one in enumerate(parameters):
        before = parameters[index - 1].kind if index else None
        if before is one.POSITIONAL_ONLY and one.kind is not one.POSITIONAL_ONLY:
            parts.append("/")
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            parts.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        parts.append(stars + one.name + "=" * (one.default is not one.empty))
    return ", ".join(parts)


def _undecorated(function: Callable, name: str) -> Callable:
    """The function that was written under this name; upstream's decorator for NVTX keeps it in a closure and does not say
    so."""
    todo = [function]
    for one in todo:
        if one.__code__.co_name == name:
            return one
        kept = [getattr(one, "__wrapped__", None), *(cell.cell_contents for cell in one.__closure__ or ())]
        todo += [each for each in kept if inspect.isfunction(each)]
    return function
