"""Where each row of a packed microbatch lives: padding, zigzag shards, positions, and the rows after a chunk's end.

A pack is a list of sequences, each padded to a multiple of `lcm(2 * cp_size, pad_multiple)` and cut into `2 * cp_size`
equal chunks; rank `r` holds chunks `r` and `2 * cp_size - 1 - r` of every sequence, in that order (the layout that
Megatron's packed rotary embedding and Transformer Engine use). Everything here is index arithmetic on the host.

Legend: R rows of the full padded pack, T rows of this rank, E rows of this rank and its halo.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist


class LayoutMismatch(RuntimeError):
    """The ranks of a context-parallel group were given different packs."""


class PackedLayout:
    """One pack of padded sequences, as one context-parallel rank sees it.

    Args:
        seq_lens: unpadded lengths; 0 is allowed.
        cp_size, cp_rank: size of the context-parallel group and this rank's place in it.
        pad_multiple: every sequence is padded to a multiple of `lcm(2 * cp_size, pad_multiple)`.
        device: of the index tensors.

    Attributes:
        seq_lens, padded_lens: tuples of ints, one per sequence.
        total_rows, local_total: R and T.
        cu_seqlens_padded: int32 `[n + 1]`, first row of each sequence in the full padded pack.
        local_rows: long `[T]`, the row of the full padded pack that each local row is.
        local_sequences: long `[T]`, the sequence of each local row.
        local_positions: long `[T]`, its position in that sequence; -1 on padding rows.

    Raises:
        ValueError: for sizes that make no layout.
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        pad_multiple: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.seq_lens = tuple(int(length) for length in seq_lens)
        if any(length < 0 for length in self.seq_lens):
            raise ValueError(f"seq_lens has {min(self.seq_lens)}; lengths are 0 or more")
        if cp_size < 1 or pad_multiple < 1:
            raise ValueError(f"cp_size is {cp_size} and pad_multiple {pad_multiple}; both are 1 or more")
        if not 0 <= cp_rank < cp_size:
            raise ValueError(f"cp_rank is {cp_rank} of cp_size {cp_size}; use 0 to {cp_size - 1}")
        self.cp_size, self.cp_rank, self.device = cp_size, cp_rank, torch.device(device)
        unit = math.lcm(2 * cp_size, pad_multiple)
        self.padded_lens = tuple(-(-length // unit) * unit for length in self.seq_lens)
        self.total_rows = sum(self.padded_lens)
        self.local_total = self.total_rows // cp_size
        self._starts = [0]
        for padded in self.padded_lens:
            self._starts.append(self._starts[-1] + padded)
        self._halos: dict[int, Halo] = {}
        self._agreed: list[dist.ProcessGroup] = []

    @cached_property
    def cu_seqlens_padded(self) -> torch.Tensor:
        return torch.tensor(self._starts, dtype=torch.int32, device=self.device)

    @cached_property
    def local_rows(self) -> torch.Tensor:
        return self.rows_of(self.cp_rank)

    @cached_property
    def local_sequences(self) -> torch.Tensor:
        return self.sequences_of(self.local_rows)

    @cached_property
    def local_positions(self) -> torch.Tensor:
        return self.positions_of(self.local_rows)

    def rows_of(self, rank: int) -> torch.Tensor:
        """`local_rows` of any rank of the group, long `[T]`."""
        pieces = []
        for start, padded in zip(self._starts, self.padded_lens, strict=False):
            half = padded // (2 * self.cp_size)
            for chunk in (rank, 2 * self.cp_size - 1 - rank):
                pieces.append(torch.arange(start + chunk * half, start + (chunk + 1) * half, device=self.device))
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long, device=self.device)

    def sequences_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The sequence that each of these full-pack rows belongs to."""
        return torch.searchsorted(self.cu_seqlens_padded.long(), rows, right=True) - 1

    def positions_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The position of each of these full-pack rows in its sequence; -1 on padding."""
        if not self.seq_lens:
            return rows
        sequences = self.sequences_of(rows)
        positions = rows - self.cu_seqlens_padded.long()[sequences]
        return torch.where(positions < torch.tensor(self.seq_lens, device=self.device)[sequences], positions, -1)

    def shard(self, x_full: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a full padded pack (differentiable)."""
        if x_full.shape[dim] != self.total_rows:
            raise ValueError(f"the full pack has {x_full.shape[dim]} rows along dim {dim}; it needs {self.total_rows}")
        return x_full.index_select(dim, self.local_rows)

    @torch.no_grad()
    def unshard(self, x_local: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor:
        """The full padded pack from every rank's rows, on every rank; no gradient. `group` may be None for one rank."""
        self._check_local(x_local, dim)
        if self.cp_size == 1:
            return x_local
        self.agree(group)
        sent = x_local.movedim(dim, 0).contiguous()
        shards = [torch.empty_like(sent) for _ in range(self.cp_size)]
        dist.all_gather(_bytes_of(shards), _bytes(sent), group=group)
        full = sent.new_empty(self.total_rows, *sent.shape[1:])
        for rank, shard in enumerate(shards):
            full[self.rows_of(rank)] = shard
        return full.movedim(0, dim)

    def pack(self, sequences: Sequence[torch.Tensor], fill=0) -> torch.Tensor:
        """The full padded pack `[R, ...]` of one tensor `[len_i, ...]` per sequence; `fill` on padding rows."""
        lengths = tuple(len(x) for x in sequences)
        if lengths != self.seq_lens:
            raise ValueError(f"the sequences to pack have lengths {lengths}; the layout was made for {self.seq_lens}")
        if not sequences:
            raise ValueError("there is no sequence to pack; a pack needs at least one")
        full = sequences[0].new_full((self.total_rows, *sequences[0].shape[1:]), fill)
        for start, x in zip(self._starts, sequences, strict=False):
            full[start : start + len(x)] = x
        return full

    def halo(self, depth: int) -> "Halo":
        """This rank's rows and the next `depth` rows of the same sequence after each; made once per depth."""
        if depth not in self._halos:
            self._halos[depth] = Halo(self, depth)
        return self._halos[depth]

    def agree(self, group: dist.ProcessGroup) -> None:
        """Compares the pack over the group, once per group: every later transfer relies on equal sizes.

        Raises:
            LayoutMismatch: on every rank, naming the ranks that differ from rank 0.
        """
        if any(group is agreed for agreed in self._agreed):
            return
        if (group.size(), group.rank()) != (self.cp_size, self.cp_rank):
            raise ValueError(
                f"the layout is rank {self.cp_rank} of {self.cp_size} but the group says {group.rank()} of "
                f"{group.size()}; make both from the same group"
            )
        mine = torch.tensor([len(self.seq_lens), self.total_rows, hash((self.seq_lens, self.padded_lens))])
        mine = mine.to(self.device)
        theirs = [torch.empty_like(mine) for _ in range(self.cp_size)]
        dist.all_gather(theirs, mine, group=group)
        others = [rank for rank, one in enumerate(theirs) if not torch.equal(one, theirs[0])]
        if others:
            told = ", ".join(f"rank {rank}: {int(one[0])} in {int(one[1])} rows" for rank, one in enumerate(theirs))
            raise LayoutMismatch(
                f"context-parallel ranks {others} hold other sequences than rank 0 (sequences and rows of {told});"
                " give every rank of the group the same pack"
            )
        self._agreed.append(group)

    def _check_local(self, x_local: torch.Tensor, dim: int) -> None:
        if x_local.shape[dim] != self.local_total:
            raise ValueError(f"the shard has {x_local.shape[dim]} rows along dim {dim}; it needs {self.local_total}")


class Halo:
    """The rows that a rank needs to look `depth` positions ahead of its own (contract E.3).

    Rows come from as many chunks as it takes, so chunks may be shorter than `depth`; what lies beyond a sequence's
    unpadded end is not there.

    Attributes:
        depth: rows to look ahead.
        rows: long `[E]`, full-pack row numbers; the first T are the rank's own, in local order.
    """

    def __init__(self, layout: PackedLayout, depth: int):
        if depth < 0:
            raise ValueError(f"a halo's depth is {depth}; use 0 or more")
        self.depth, self._layout = depth, layout
        own = layout.local_rows
        self._extra = self._extra_rows(layout.cp_rank)
        self.rows = torch.cat([own, self._extra])
        self._place = own.new_full((layout.total_rows,), -1)
        self._place[self.rows] = torch.arange(len(self.rows), device=own.device)

    def _ahead(self, rows: torch.Tensor, distance: int) -> torch.Tensor:
        """The full-pack row `distance` positions after each row; -1 where the sequence has none."""
        layout = self._layout
        if not layout.seq_lens:
            return rows
        positions = layout.positions_of(rows)
        lengths = torch.tensor(layout.seq_lens, device=rows.device)[layout.sequences_of(rows)]
        return torch.where((positions >= 0) & (positions + distance < lengths), rows + distance, -1)

    def _extra_rows(self, rank: int) -> torch.Tensor:
        """The rows that a rank looks at and does not own, ascending."""
        layout = self._layout
        own = layout.rows_of(rank)
        wanted = own.new_zeros(layout.total_rows, dtype=torch.bool)
        if layout.cp_size > 1:
            for distance in range(1, self.depth + 1):
                ahead = self._ahead(own, distance)
                wanted[ahead[ahead >= 0]] = True
            wanted[own] = False
        return wanted.nonzero().flatten()

    def index(self, distance: int) -> torch.Tensor:
        """Long `[T]`: where the extended buffer holds position + `distance` of the same sequence; -1 where none is."""
        if not 0 <= distance <= self.depth:
            raise ValueError(f"the distance is {distance}; this halo reaches 0 to {self.depth}")
        ahead = self._ahead(self._layout.local_rows, distance)
        return torch.where(ahead >= 0, self._place[ahead.clamp(min=0)], -1) if len(ahead) else ahead

    @torch.no_grad()
    def exchange(self, x_local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """`[E, ...]` from every rank's `[T, ...]`: one all-to-all of just the rows that are looked at. No gradient."""
        layout = self._layout
        layout._check_local(x_local, 0)
        if layout.cp_size == 1:
            return x_local
        layout.agree(group)
        x_local = x_local.contiguous()
        sent_rows, sent_counts, received_counts, order = self._routes
        received = x_local.new_empty(len(self._extra), *x_local.shape[1:])
        sent = _bytes(x_local[sent_rows])
        dist.all_to_all_single(_bytes(received), sent, received_counts, sent_counts, group=group)
        halo = torch.empty_like(received)
        halo[order] = received
        return torch.cat([x_local, halo])

    @cached_property
    def _routes(self) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        """Local rows to send, rank after rank; rows to and from each rank; where each received row goes in the halo."""
        layout = self._layout
        sent = []
        for rank in range(layout.cp_size):
            local = self._local_place[self._extra_rows(rank)]
            sent.append(local[local >= 0])
        owner = self._place.new_empty(layout.total_rows)
        for rank in range(layout.cp_size):
            owner[layout.rows_of(rank)] = rank
        from_rank = owner[self._extra]
        received_counts = [int((from_rank == rank).sum()) for rank in range(layout.cp_size)]
        return torch.cat(sent), [len(x) for x in sent], received_counts, torch.argsort(from_rank, stable=True)

    @property
    def _local_place(self) -> torch.Tensor:
        """The local row that each full-pack row is; -1 for rows of other ranks."""
        return torch.where(self._place < self._layout.local_total, self._place, -1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """`[rows, bytes per row]` of a contiguous tensor, sharing its memory: collectives know bytes, not every dtype."""
    return x.view(len(x), math.prod(x.shape[1:])).view(torch.uint8)


def _bytes_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_bytes(x) for x in tensors]
