"""`nemo-ext patch apply|status|check|revert --upstream PATH`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_ext.nemo_rl import patching
from nemo_ext.nemo_rl.patch_set import PatchError, PatchSet

ACTIONS = {
    "apply": "insert the hooks",
    "status": "say which version it is and whether it is patched",
    "check": "exit with 0 only if it is patched whole, 1 if it is not, 2 if it is neither",
    "revert": "take the hooks out again",
}


def main(argv: Sequence[str], sets: Sequence[PatchSet] | None = None) -> int:
    """Runs one action; `sets` are the patches to know, by default the package's own. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="nemo-ext patch",
        description="Patch a NeMo-RL checkout. " + "; ".join(f"{name}: {what}" for name, what in ACTIONS.items()) + ".",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--upstream", metavar="PATH", type=Path, required=True, help="root of the NeMo-RL checkout")
    try:
        args = parser.parse_args(list(argv))
    except SystemExit as end:
        return int(end.code or 0)
    try:
        return _run(args.action, args.upstream.expanduser().resolve(), sets)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(action: str, root: Path, sets: Sequence[PatchSet] | None) -> int:
    if action in ("apply", "revert"):
        checkout, done = (patching.apply if action == "apply" else patching.revert)(root, sets)
        already = "" if done else " already"
        print(f"{_name(checkout)}: {checkout.state}{already} ({len(checkout.patches.files)} files)")
        return 0
    checkout = patching.recognise(root, sets)
    print(f"{_name(checkout)}: {checkout.state}")
    return 1 if action == "check" and checkout.state != patching.PATCHED else 0


def _name(checkout: patching.Checkout) -> str:
    return f"{checkout.root} is NeMo-RL {checkout.patches.version}"
