"""How one Megatron parameter holds its Hugging Face tensors, and how tensor parallelism cuts it.

Each class answers two questions, inverse to each other bit by bit: `shard` gives rank r's part of the fused parameter
from the full Hugging Face tensors, and `merge` gives those tensors back from the parts of all t ranks.

Shape legend: first dimension is a linear layer's output, second its input (torch's weight layout).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Whole:
    """One tensor, the same on every rank."""

    def shard(self, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        return tensors[0]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class VocabRows:
    """One tensor cut along the vocabulary, which is padded with zero rows to a multiple of the number of ranks."""

    vocab_size: int

    def shard(self, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        padded = F.pad(tensors[0], (0, 0, 0, -self.vocab_size % size))
        return padded.chunk(size)[rank]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(shards)[: self.vocab_size]]


@dataclass(frozen=True)
class Columns:
    """One tensor cut along its input (a row-parallel linear layer)."""

    def shard(self, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        return tensors[0].chunk(size, dim=1)[rank]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(shards, dim=1)]


@dataclass(frozen=True)
class GateUp:
    """Gate and up projections: each rank holds its rows of the gate, then its rows of the up projection."""

    def shard(self, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]


@dataclass(frozen=True)
class QKV:
    """Query, key and value projections, interleaved by query group: q q k v | q q k v | ..., cut along rows."""

    query_groups: int
    heads_per_group: int
    head_dim: int

    def shard(self, tensors: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
        by_group = [tensor.unflatten(0, (self.query_groups, -1)) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1).chunk(size)[rank]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        by_group = torch.cat(shards).unflatten(0, (self.query_groups, -1))
        rows = [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in by_group.split(rows, dim=1)]
