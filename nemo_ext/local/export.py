"""`nemo-ext export`: a run's policy and draft as Hugging Face folders."""

import shutil
from pathlib import Path

from nemo_ext.config import ConfigError
from nemo_ext.local import checkpoint


def run(run_folder: Path, to: Path) -> list[Path]:
    """Copies `policy` and, where the run has one, `draft` of the newest checkpoint into `to`; the folders' paths.

    `vllm serve` and transformers load them as they are. Raises ConfigError for a run without a checkpoint and for
    a target that already holds such folders.
    """
    source = checkpoint.latest(run_folder)
    if source is None:
        raise ConfigError(
            f"RUN is {run_folder}, which has no checkpoint; train with checkpointing.enabled=true, or name another run"
        )
    names = [name for name in ("policy", "draft") if (source / name).is_dir()]
    taken = [to / name for name in names if (to / name).exists()]
    if taken:
        raise ConfigError(f"--to is {to}, where {taken[0].name} already exists; name an empty or new folder")
    try:
        for name in names:
            shutil.copytree(source / name, to / name)
    except OSError as error:
        why = error.strerror or "see its disk"
        raise ConfigError(f"--to is {to}, where nothing can be written ({why}); name another folder") from None
    return [to / name for name in names]
