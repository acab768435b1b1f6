"""`nemo-ext patch ACTION --upstream PATH`: what is said, and the exit code."""

from collections.abc import Sequence
from pathlib import Path

from nemo_ext.config import ConfigError, nearest
from nemo_ext.nemo_rl import patching
from nemo_ext.nemo_rl.patch_set import PatchError, PatchSet

ACTIONS = ("apply", "status", "check", "revert")


def run(action: str, upstream: Path, sets: Sequence[PatchSet] | None = None) -> int:
    """Runs one action; `sets` are the patches to know, by default the package's own.

    Returns 0, or 1 for `check` of a checkout that is not patched.

    Raises:
        ConfigError: there is no such action, or the checkout is none that the patches fit. Nothing was changed.
    """
    if action not in ACTIONS:
        raise ConfigError(f"{action} is not an action of patch; {nearest(action, ACTIONS, 'the actions are')}")
    root = upstream.expanduser().resolve()
    try:
        if action in ("apply", "revert"):
            checkout, done = (patching.apply if action == "apply" else patching.revert)(root, sets)
            files = len(checkout.patches.files)
            print(f"{_name(checkout)}: {checkout.state}{'' if done else ' already'} ({files} files)")
            return 0
        checkout = patching.recognise(root, sets)
    except PatchError as error:
        raise ConfigError(str(error)) from None
    print(f"{_name(checkout)}: {checkout.state}")
    return 1 if action == "check" and checkout.state != patching.PATCHED else 0


def _name(checkout: patching.Checkout) -> str:
    return f"{checkout.root} is NeMo-RL {checkout.patches.version}"
