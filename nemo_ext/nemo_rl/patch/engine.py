"""Which vLLM a checkout asks for: the versions of upstream that a draft can tell apart differ in it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from nemo_ext.nemo_rl.patch.source import NotFound

_PINNED = re.compile(r"vllm(?:\[[^]]*\])?\s*(?:==\s*|@\s*\S*/vllm-)(\d+(?:\.\d+)*)(?![\w.]*\*)")


def vllm_version(root: Path) -> str:
    """The one version that the checkout's `pyproject.toml` pins. Raises NotFound if it pins none, or several."""
    try:
        told = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        raise NotFound("pyproject.toml, which tells the version of vLLM, cannot be read") from None
    found = sorted({hit[1] for hit in map(_PINNED.match, _strings(told)) if hit})
    if len(found) != 1:
        raise NotFound(f"pyproject.toml pins {' and '.join(found) or 'no version'} of vLLM")
    return found[0]


def _strings(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)
