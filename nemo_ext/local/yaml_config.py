"""YAML files as NeMo-RL has them: OmegaConf, `defaults:` inheritance, interpolation, `key=value` overrides."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_ext.config import ConfigError

OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict:
    """Reads `path` into plain data.

    Its `defaults:` (a path or a list of paths, each relative to the file that names it) come first, then the file's own
    keys, then `overrides` like `policy.draft.ttt_steps=2` or `data.tasks[0].weight=2`. Interpolations such as
    `${policy.max_total_sequence_length}` and `${mul:a,b}` are resolved last.

    Raises ConfigError for a missing or malformed file, a circle of `defaults`, a malformed override, and an
    interpolation that leads nowhere.
    """
    config = _with_defaults(Path(path), ())
    for text in overrides:
        _override(config, text)
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)} (in {path})") from None


def _with_defaults(path: Path, children: tuple[Path, ...]) -> DictConfig:
    """One file over its defaults. `children`: the files that led here, the outermost first."""
    config = _read(path, children)
    if path.resolve() in [child.resolve() for child in children]:
        raise ConfigError(f"defaults of {children[-1]} is {path}, which inherits from it; take one of the two away")
    defaults = config.pop("defaults", [])
    merged = OmegaConf.create({})
    for default in [defaults] if isinstance(defaults, str) else defaults:
        merged = _merge(merged, _with_defaults(path.parent / str(default), (*children, path)))
    return _merge(merged, config)


def _read(path: Path, children: tuple[Path, ...]) -> DictConfig:
    what = f"defaults of {children[-1]}" if children else "CONFIG"
    if not path.is_file():
        raise ConfigError(f"{what} is {path}: {'a folder; name a YAML file' if path.is_dir() else 'no such file'}")
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} is {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{what} is {path}: it must hold sections, like 'policy:'")
    return config


def _merge(base: DictConfig, over: DictConfig) -> DictConfig:
    """`over` on `base`; a section with `_override_: true` replaces the base's instead of joining it."""
    for key in over:
        if OmegaConf.is_dict(over._get_node(key)) and not OmegaConf.is_missing(over, key) and over[key] is not None:
            if over[key].pop("_override_", False):
                base.pop(key, None)
    return OmegaConf.merge(base, over)


def _override(config: DictConfig, text: str) -> None:
    """Sets one `key=value`, the value being YAML."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip("+~ ") == part and part for part in key.split(".")):
        raise ConfigError(f"override is {text}; write key=value, like policy.draft.ttt_steps=2")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]
        OmegaConf.update(config, key, parsed, merge=True)
    except (YAMLError, OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"override is {text}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
