"""Names, types and shapes of a safetensors file from its header alone: neither torch nor the weights are loaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file. `dtype` is the format's own name (`F32`, `BF16`, `I64`, `BOOL`, ...)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte offsets in the file
    end: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of the file by name. Raises ValueError for a file that is not safetensors or is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it is not a safetensors file, or it is cut short")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ValueError("it is not a safetensors file") from None
    header.pop("__metadata__", None)
    entries = {
        name: TensorEntry(e["dtype"], tuple(e["shape"]), *(8 + length + offset for offset in e["data_offsets"]))
        for name, e in header.items()
    }
    if any(entry.end > size for entry in entries.values()):
        raise ValueError("it is cut short")
    return entries


def read_int64(file: Path, entry: TensorEntry) -> np.ndarray:
    """The values of one I64 tensor."""
    with file.open("rb") as stream:
        stream.seek(entry.begin)
        return np.frombuffer(stream.read(entry.end - entry.begin), dtype="<i8").reshape(entry.shape)
