"""pytest plugin for upstream's own tests, which are run in two checkouts beside each other.

No test starts or joins a Ray cluster, so that the runs do not meet, and none is left over: files whose tests all want one
(algorithms/test_grpo.py) are not in the lists. Tests of files are named by the path inside the checkout, so that both runs
have the same names: pytest leaves paths out that it finds too long and numbers them in the order of the disk.
"""

import os
from pathlib import Path

import ray


def _refuse(*args, **kwargs):
    raise RuntimeError("no Ray cluster in the regression run")


ray.init = ray._private.worker.init = _refuse


def pytest_make_parametrize_id(config, val):
    """The id of a path in the checkout."""
    checkout = config.invocation_params.dir
    if isinstance(val, str | Path) and os.path.isabs(val) and Path(val).is_relative_to(checkout):
        return str(Path(val).relative_to(checkout))
    return None
