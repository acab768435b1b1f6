"""The policies that runs are checked with: published Hugging Face configs, and drafts with all but their weights.

`fixtures/policy_configs` has a file a model: the keys that matter, under `_model` its name on the hub, under `_source` how
the numbers were found, under `_unverified` those that only a guess or a sister model tells.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.drafts import kinds
from nemo_ext.drafts.block_shapes import block_shapes
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.eagle3_folder import eagle3_shapes
from nemo_ext.drafts.fresh_sizes import fresh_sizes
from nemo_ext.nemo_rl import draft_folder

_FILES = Path(__file__).parent / "fixtures" / "policy_configs"
POLICIES = sorted(file.stem for file in _FILES.glob("*.json"))


def published(name: str) -> dict:
    """config.json of one of `POLICIES`, or of a name on the hub."""
    for file in _FILES.glob("*.json"):
        found = json.loads(file.read_text())
        if name in (file.stem, found["_model"]):
            return {key: value for key, value in found.items() if not key.startswith("_")}
    raise KeyError(name)


def text_model(name: str) -> dict:
    """config.json of the text model alone: of a published multimodal policy as `save_pretrained` writes it."""
    config = published(name)
    if "text_config" not in config:
        return config
    architecture = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    return {"architectures": [architecture], **config["text_config"]}


def write_policy(folder: Path, config: dict) -> str:
    """A policy's folder with a config and nothing else; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def shape_table() -> str:
    """The documentation's table of fresh drafts, in Markdown."""
    rows = ["| policy | attention heads | key-value heads | head size | feed-forward |", "|---|---|---|---|---|"]
    for name in POLICIES:
        model = json.loads((_FILES / f"{name}.json").read_text())["_model"]
        sizes = fresh_sizes(text_model(name))
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        rows.append(f"| {model.partition('/')[2]} | {' | '.join(str(sizes[key]) for key in keys)} |")
    return "\n".join(rows)


def leave_weights_out(monkeypatch) -> None:
    """Fresh drafts are written with the header of their weights' file and holes for the numbers, gigabytes of them."""
    monkeypatch.setattr(kinds.Eagle3Kind, "fresh_tensors", lambda self, shape, *rest: eagle3_shapes(shape))
    monkeypatch.setattr(kinds.BlockKind, "fresh_tensors", lambda self, shape, *rest: block_shapes(shape))
    monkeypatch.setattr(draft_folder, "save_file", lambda shapes, file, metadata: _write_holes(file, shapes))


def write_public_eagle3(folder: Path, policy: dict) -> str:
    """An EAGLE-3 draft of a policy in a common public form: reduced vocabulary, tapped layers told; weights are holes."""
    taps = draft_folder.default_taps(policy["num_hidden_layers"])
    shape = Eagle3Config.for_policy(fresh_sizes(policy), taps, draft_vocab_size=32000)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.to_hf("bfloat16")))
    _write_holes(folder / "model.safetensors", eagle3_shapes(shape), {"d2t": (32000,)}, {"t2d": (shape.vocab_size,)})
    return str(folder)


def _write_holes(file: Path, floats: Mapping, longs: Mapping = {}, flags: Mapping = {}) -> None:
    header, end = {}, 0
    for kind, size, shapes in (("F32", 4, floats), ("I64", 8, longs), ("BOOL", 1, flags)):
        for name, shape in shapes.items():
            bytes_ = size * math.prod(shape)
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + bytes_]}
            end += bytes_
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
