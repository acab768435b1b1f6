"""`policy.draft`: its one schema, its checks, and the one-line errors in which every setting's trouble is told."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

# Keys of `policy.draft` that only some kinds of draft read; all kinds read the others.
READ_BY: dict[str, tuple[str, ...]] = {
    "ttt_steps": ("eagle3",),
    "ttt_pass_weights": ("eagle3",),
    "mask_out_of_draft_vocab": ("eagle3",),
    "norm_output": ("eagle3",),
    "norm_before_residual": ("eagle3",),
    "fc_norm": ("eagle3",),
    "trunk_residency": ("eagle3",),
    "trunk_budget_gb": ("eagle3",),
    "gamma": ("dflash", "dspark"),
    "anchors_per_seq": ("dflash", "dspark"),
    "mask_token_id": ("dflash", "dspark"),
    "sliding_window": ("dflash", "dspark"),
    "loss_weighting": ("dflash", "dspark"),
    "hard_labels": ("dflash",),
    "markov_rank": ("dspark",),
    "ce_loss_alpha": ("dspark",),
    "tv_loss_alpha": ("dspark",),
    "confidence_head_alpha": ("dspark",),
}


MAX_LAYERS = 128  # of a draft


class ConfigError(ValueError):
    """Settings or files that cannot work. `lines`: one for each, naming the setting, its value and what would work."""

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))
        self.lines = tuple(line for text in lines for line in text.splitlines())


class Section(BaseModel):
    """A YAML section: no unknown keys, no silent conversions, no NaN.

    Validators raise ValueError with a message that begins with the name of a key of their own section; `validated` puts
    the section's path before it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], data: Mapping[str, Any], path: str = "") -> Model:
    """Builds `model` from plain data. `path` is where the section stands in the YAML ("" for the whole file).

    Raises ConfigError with a line for each wrong, missing or unknown key.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [line for e in error.errors() for line in _lines(model, e, path)]
        raise ConfigError(*dict.fromkeys(lines)) from None


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The line for a key that nothing reads, with the nearest of its section's keys, or all of them."""
    section, _, key = path.rpartition(".")
    where = f" in {section}" if section else ""
    return f"{path} is not a setting; {nearest(key, known, f'the settings{where} are')}"


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """`did you mean X?`, or `otherwise` with the whole list."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"{otherwise} {', '.join(known)}"


_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list, like [1, 2]",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def _lines(model: type[BaseModel], error: dict[str, Any], path: str) -> list[str]:
    """pydantic's error as ours."""
    loc, kind, value = error["loc"], error["type"], error["input"]
    name = _join(path, loc)
    if kind == "extra_forbidden":
        return [unknown_key(name, _section_keys(model, loc[:-1]))]
    if kind == "missing":
        return [f"{name} is missing; set it"]
    if kind == "value_error":
        # A field's validator names its own key, as a section's does.
        at_field = bool(loc) and _section_keys(model, loc) == ()
        section = _join(path, loc[:-1] if at_field else loc)
        return [f"{section}.{line}" if section else line for line in str(error["ctx"]["error"]).splitlines()]
    if kind == "literal_error":
        expected = [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return [f"{name} is {show(value)}; it must be one of {', '.join(expected)}"]
    if kind in _BOUNDS:
        key, sign = _BOUNDS[kind]
        return [f"{name} is {show(value)}; it must be {sign} {error['ctx'][key]:g}"]
    if kind == "string_too_short":
        return [f"{name} is empty; give a text"]
    if kind == "too_short":
        return [f"{name} is {show(value)}; it must have at least {error['ctx']['min_length']} entry"]
    text = f"'{value}'" if isinstance(value, str) else show(value)
    return [f"{name} is {text}; it must be {_TYPES.get(kind, error['msg'])}"]


def show(value: Any) -> str:
    """A value as YAML has it, cut to 80 characters; sections by their kind only."""
    if isinstance(value, dict):
        return "a section"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_output(option: str, file: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raises ConfigError unless a command can write `file`, given as `option`, and its name ends with one of `suffixes`."""
    if suffixes and file.suffix not in suffixes:
        raise ConfigError(f"{option} is {file}; name a {' or '.join(suffixes)} file")
    if file.is_dir():
        raise ConfigError(f"{option} is {file}, a folder; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} is {file}: no folder {file.parent}; name a file in a folder that is there")


def _join(path: str, loc: tuple) -> str:
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _section_keys(model: type[BaseModel], loc: tuple) -> tuple[str, ...]:
    """Keys of the section at `loc`; () where a plain value stands."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        model = _section_type(field.annotation) if field else None
        if model is None:
            return ()
    return tuple(model.model_fields)


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """The section inside `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_type(part) for part in getattr(annotation, "__args__", ()))
    return next((part for part in found if part is not None), None)


class DraftOptimizer(Section):
    """The draft's own Adam; the policy's optimizer, norm and clip do not see the draft."""

    lr: float = Field(1e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, gt=0)  # of the draft's own gradient norm
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    lr_warmup_iters: int = Field(0, ge=0)  # optimizer steps over which lr rises from 0


class DraftConfig(Section):
    """`policy.draft`.

    Attributes:
        enabled: train the draft along with the policy. Off, a draft that `speculative_config` serves stays frozen.
        engine: `nemo_ext`, this package.
        speculator_type: the kind of draft; `READ_BY` has the keys that belong to some kinds only.
        model_name: draft folder (Hugging Face, safetensors) to start from; null makes a fresh one.
        loss_weight: lambda of `L_RL + lambda * L_draft`.
        num_layers: decoder layers of the draft; null: 1, or the checkpoint's.
        aux_layer_indices: tapped policy layers, from 0; index l is the OUTPUT of decoder layer l, which vLLM's EAGLE-3
            calls l + 1. Ascending, because vLLM sorts its ids. null: `default_taps`, or the checkpoint's.
        ttt_steps: passes of training-time test; a draft is trained for as many tokens per chain.
        ttt_pass_weights: one weight a pass; null weighs all alike.
        draft_vocab_size: reduced vocabulary; null: the policy's whole vocabulary, or the checkpoint's.
        mask_out_of_draft_vocab: leave out rows whose most likely token is outside the reduced vocabulary.
        norm_output: feed back the post-norm hidden state to the next pass (vLLM's meaning). null: false; a checkpoint
            that says true must be confirmed here, because other trainers write the same key with another meaning.
        norm_before_residual: the residual is the normed feature. null: false, or the checkpoint's.
        fc_norm: an RMSNorm per tap before `fc`. null: false, or the checkpoint's.
        gamma: tokens that a block drafts. null: the checkpoint's; a fresh draft needs a number.
        anchors_per_seq: blocks per sequence and step, drawn from the rows whose next token is trained on.
        mask_token_id: policy token whose embedding stands in a block's open slots; one that texts do not have. null: the
            checkpoint's; a fresh draft needs one.
        sliding_window: keys that a slot sees, of trunk and block; null: all, or as the checkpoint has it.
        loss_weighting: of a block's slots: `uniform`, or `exp`, falling with the distance from the anchor.
        hard_labels: a DFlash draft learns the tokens that came, not the policy's distributions.
        markov_rank: of a DSpark draft's head over the token before; null: 64, or the checkpoint's.
        ce_loss_alpha, tv_loss_alpha, confidence_head_alpha: weights of DSpark's three terms: cross-entropy with the token
            that came, L1 distance of the distributions (not halved), and the confidence head's.
        trunk_residency: under context parallelism, where the trunk's keys and values live over the passes. `ring`: they
            go round in every pass; `resident`: each rank keeps the shards that pass 1 received; `auto`: resident if it
            fits the budget. The numbers are the same.
        trunk_budget_gb: memory per rank that `auto` may give a resident trunk, keys, values and their gradients, in 1e9
            bytes.
        tap_transport: how taps reach the last pipeline stage; `auto` chooses by placement and what is installed.
        optimizer: the draft's own.
    """

    enabled: bool = False
    engine: Literal["nemo_ext"] = "nemo_ext"
    speculator_type: Literal["eagle3", "dflash", "dspark"] = "eagle3"
    model_name: str | None = None
    loss_weight: float = Field(0.1, gt=0)
    num_layers: int | None = Field(None, ge=1, le=MAX_LAYERS)
    aux_layer_indices: list[int] | None = Field(None, min_length=1)
    ttt_steps: int = Field(3, ge=1)
    ttt_pass_weights: list[float] | None = None
    draft_vocab_size: int | None = Field(None, ge=2)
    mask_out_of_draft_vocab: bool = False
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    fc_norm: bool | None = None
    gamma: int | None = Field(None, ge=1)
    anchors_per_seq: int = Field(512, ge=1)
    mask_token_id: int | None = Field(None, ge=0)
    sliding_window: int | None = Field(None, ge=1)
    loss_weighting: Literal["uniform", "exp"] = "exp"
    hard_labels: bool = False
    markov_rank: int | None = Field(None, ge=1)
    ce_loss_alpha: float = Field(0.1, ge=0)
    tv_loss_alpha: float = Field(0.9, ge=0)
    confidence_head_alpha: float = Field(1.0, ge=0)
    trunk_residency: Literal["ring", "resident", "auto"] = "auto"
    trunk_budget_gb: float = Field(1.0, ge=0)
    tap_transport: Literal["auto", "local", "shm", "p2p", "nixl"] = "auto"
    optimizer: DraftOptimizer = Field(default_factory=DraftOptimizer)

    @property
    def pass_weights(self) -> list[float]:
        """One weight a pass."""
        return list(self.ttt_pass_weights or [1.0] * self.ttt_steps)

    @property
    def trunk_budget_bytes(self) -> float:
        """What a resident trunk may take per rank."""
        return {"ring": 0.0, "resident": float("inf"), "auto": self.trunk_budget_gb * 1e9}[self.trunk_residency]

    @property
    def unread_keys(self) -> set[str]:
        """Keys that this kind of draft does not read."""
        return {key for key, kinds in READ_BY.items() if self.speculator_type not in kinds}

    @field_validator("aux_layer_indices")
    @classmethod
    def _ascending(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and value != sorted(set(value)):
            raise ValueError(
                f"aux_layer_indices is {value}; vLLM sorts layers and drops repeats, so give {sorted(set(value))}"
            )
        if value is not None and value[0] < 0:
            raise ValueError(f"aux_layer_indices is {value}; layers are numbered from 0")
        return value

    @model_validator(mode="after")
    def _nothing_unread(self) -> "DraftConfig":
        # A recipe may stand on another kind's, so what says no more than the default says nothing.
        for key in READ_BY:
            value, default = getattr(self, key), type(self).model_fields[key].default
            if key in self.unread_keys and value != default:
                raise ValueError(
                    f"{key} is {show(value)}, which is a setting of {' and '.join(READ_BY[key])} and not of "
                    f"speculator_type {self.speculator_type}; leave it out, or set {show(default)}, the default"
                )
        return self

    @model_validator(mode="after")
    def _tokens_are_learnt(self) -> "DraftConfig":
        if self.ce_loss_alpha == self.tv_loss_alpha == 0:
            raise ValueError(
                f"ce_loss_alpha is {self.ce_loss_alpha} and tv_loss_alpha is {self.tv_loss_alpha}, so nothing would teach "
                "the draft its tokens; set one of them > 0"
            )
        return self

    @model_validator(mode="after")
    def _weights_fit_passes(self) -> "DraftConfig":
        weights = self.ttt_pass_weights
        if weights is None:
            return self
        if len(weights) != self.ttt_steps:
            raise ValueError(
                f"ttt_pass_weights is {weights}, {len(weights)} values, but ttt_steps is {self.ttt_steps}; "
                "give one weight a pass, or null"
            )
        if min(weights) < 0 or max(weights) == 0:
            raise ValueError(f"ttt_pass_weights is {weights}; weights must be >= 0 and one of them > 0")
        return self


def default_taps(num_layers: int) -> list[int]:
    """Tapped layers where nothing names them: vLLM's own low, middle and high layer where the policy is deep enough for
    three, else its first, middle and last layer."""
    vllm = [1, num_layers // 2 - 1, num_layers - 4]
    return vllm if vllm[0] < vllm[1] < vllm[2] else sorted({0, (num_layers - 1) // 2, num_layers - 1})


def taps_outside(taps: list[int], num_layers: int) -> list[str]:
    """A line for taps that the policy does not have; [] where all fit."""
    if taps[-1] < num_layers:
        return []
    return [
        f"policy.draft.aux_layer_indices is {taps}, but the policy has {num_layers} layers; "
        f"the highest index is {num_layers - 1} (index l is the output of layer l, from 0)"
    ]
