"""pytest plugin: no test starts or joins a Ray cluster, so that runs beside each other do not meet, and none is left over.

Files whose tests all want one (algorithms/test_grpo.py) are not in the lists.
"""

import ray


def _refuse(*args, **kwargs):
    raise RuntimeError("no Ray cluster in the regression run")


ray.init = ray._private.worker.init = _refuse
