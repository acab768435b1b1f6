"""`data.tasks` against reasoning-gym: names and settings of task families."""

import json
from collections.abc import Iterator
from typing import Any

from nemo_ext.config import nearest, show
from nemo_ext.local.settings import RunConfig


def task_lines(config: RunConfig) -> Iterator[str]:
    """A line for every task family that reasoning-gym has not, or whose settings it refuses."""
    try:
        import reasoning_gym  # noqa: F401  (fills DATASETS)
        from reasoning_gym.factory import DATASETS
    except ImportError:
        yield "data.tasks needs reasoning-gym, which is not installed; install the extra: pip install 'nemo-ext[cpu]'"
        return
    for index, task in enumerate(config.data.tasks):
        where = f"data.tasks[{index}]"
        if task.name in DATASETS:
            _, settings = DATASETS[task.name]
            yield from _setting_lines(f"{where}.config", task.name, task.config, settings)
        else:
            yield f"{where}.name is {task.name}; {nearest(task.name, DATASETS, 'reasoning-gym has')}"


def _setting_lines(where: str, name: str, given: dict[str, Any], settings: type) -> Iterator[str]:
    """`given` against the family's own dataclass `settings`."""
    known = [key for key in settings.__dataclass_fields__ if key not in ("seed", "size")]
    unknown = [key for key in given if key not in known]
    for key in unknown:
        yield f"{where}.{key} is not a setting of {name}; {nearest(key, known, 'its settings are')}"
    if unknown:
        return
    try:
        made = settings(**given)
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:  # a family checks itself with assertions, and stumbles over wrong types anyhow
        says = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield f"{where} is {show(json.dumps(given))}, which {name} refuses: {says}"
