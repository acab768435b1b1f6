"""Pytest plugin of `drift.py`: writes down which of upstream's files a run imported, into the file `$NEMO_RL_IMPORTED`."""

import os
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  (some builds of torch cannot import it once the tests have put the CPU in CUDA's place)


def pytest_sessionfinish():
    root = Path(os.environ["NEMO_RL_UPSTREAM"]).resolve()
    files = {
        Path(found).resolve() for module in list(sys.modules.values()) if (found := getattr(module, "__file__", None))
    }
    paths = sorted(str(path.relative_to(root)) for path in files if path.is_relative_to(root))
    Path(os.environ["NEMO_RL_IMPORTED"]).write_text("\n".join(paths))
