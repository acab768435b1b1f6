"""NeMo-RL's microbatches as packs of this package: which rows upstream's forward has, and which the draft wants.

Upstream runs a microbatch as `[1, T]` packed rows, or as `[B, S]` rows padded to one length; its hidden states are
`[T, 1, H]` or `[S, B, H]`. The draft sees one pack in both cases, without the padding where context parallelism does
not fix it.

Legend: R rows of the draft's full padded pack, T rows of it on this rank, E rows with halo.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from nemo_rl.models.megatron.data import _get_pack_sequence_parameters_for_megatron

from nemo_ext.layout import PackedLayout


@dataclass(frozen=True)
class DraftBatch:
    """One microbatch on one rank.

    Attributes:
        layout: the draft's pack.
        tokens_R: its token ids, 0 on padding.
        label_mask_R: 1 on tokens that are trained on.
        sample_ids: a number for each sequence, a digest of its tokens, so that it is the same in every layout.
        starts: first row of each sequence in upstream's full pack; None under context parallelism, where upstream's rows
            of this rank are the layout's own.
        unpacked_size: B of `[B, S]` rows; None for packed rows.
        forward_rows: rows of upstream's forward on this rank, before sequence parallelism cuts them.
    """

    layout: PackedLayout
    tokens_R: torch.Tensor
    label_mask_R: torch.Tensor
    sample_ids: tuple[int, ...]
    starts: tuple[int, ...] | None
    unpacked_size: int | None
    forward_rows: int

    @cached_property
    def _upstream_rows_T(self) -> torch.Tensor | None:
        """For each row of the layout the row of upstream's pack; any on padding. None where they are the same."""
        layout = self.layout
        if self.starts is None:
            return None
        starts = torch.tensor(self.starts, device=layout.device)
        rows_T = starts[layout.local_sequences] + layout.local_positions.clamp(min=0)
        same = len(rows_T) == self.forward_rows and bool(
            (rows_T == torch.arange(len(rows_T), device=rows_T.device)).all()
        )
        return None if same else rows_T

    def of_hidden(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Rows of a flattened `[T, 1, H]` or `[S, B, H]` in the layout's order."""
        rows_T, size = self._upstream_rows_T, self.unpacked_size
        if size is not None and size > 1:
            x_TH = x_TH.unflatten(0, (-1, size)).transpose(0, 1).flatten(0, 1)
        return x_TH if rows_T is None else x_TH[rows_T]

    def of_logits(self, x_BSV: torch.Tensor) -> torch.Tensor:
        """Rows of `[1, T, V]` or `[B, S, V]` in the layout's order."""
        rows_T = self._upstream_rows_T
        x_TV = x_BSV.flatten(0, 1)
        return x_TV if rows_T is None else x_TV[rows_T]

    def check_forward(self, input_ids: torch.Tensor) -> None:
        """Raises RuntimeError unless these are the ids of upstream's forward."""
        ids_T = input_ids.flatten()
        rows_T = self._upstream_rows_T
        seen_T = ids_T if rows_T is None else ids_T[rows_T]
        real_T = self.layout.local_positions >= 0
        wanted_T = self.tokens_R[self.layout.local_rows]
        if len(ids_T) != self.forward_rows or not torch.equal(seen_T[real_T], wanted_T[real_T]):
            raise RuntimeError(
                f"the forward has {len(ids_T)} rows of other tokens than the {self.forward_rows} of the draft's microbatch; "
                "this NeMo-RL makes its microbatches in another way than the patched version does"
            )


def draft_batches(
    batch: Any,
    cfg: Mapping[str, Any],
    micro_batch_size: int,
    *,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str,
) -> list[DraftBatch]:
    """The microbatches into which upstream's `get_microbatch_iterator` cuts one global batch's share of this rank.

    Args:
        batch: upstream's BatchedDataDict with `input_ids`, `input_lengths`, `token_mask`, `sample_mask`.
        cfg: `policy`.
    """
    if cfg["sequence_packing"]["enabled"]:
        _, longest = batch.get_microbatch_iterator_for_packable_sequences_len()
        pad = Padding.of(cfg, longest)
        raw = batch.make_microbatch_iterator_for_packable_sequences()
        return [_packed(one, pad, cp_size, cp_rank, device) for one in raw]
    if cfg["dynamic_batching"]["enabled"]:
        raw = batch.make_microbatch_iterator_with_dynamic_shapes()
    else:
        raw = batch.make_microbatch_iterator(micro_batch_size)
    return [_unpacked(one, device) for one in raw]


def max_pack_rows(cfg: Mapping[str, Any]) -> int:
    """Rows of the largest microbatch, padding included, over all context-parallel ranks. `cfg`: `policy`."""
    unit = cfg["make_sequence_length_divisible_by"]
    longest = _up(cfg["max_total_sequence_length"], unit)
    if cfg["sequence_packing"]["enabled"]:
        longest = max(_up(cfg["sequence_packing"]["train_mb_tokens"], unit), longest)
        return _up(longest, Padding.of(cfg, longest).pack_multiple)
    if cfg["dynamic_batching"]["enabled"]:
        return max(_up(cfg["dynamic_batching"]["train_mb_tokens"], unit), longest)
    return cfg["train_micro_batch_size"] * longest


@dataclass(frozen=True)
class Padding:
    """How upstream pads packs: each sequence to a multiple, the last one so that the pack has a multiple or a size."""

    sequence_multiple: int
    pack_multiple: int
    pack_size: int | None

    @classmethod
    def of(cls, cfg: Mapping[str, Any], longest: int) -> "Padding":
        """`cfg`: `policy`. `longest`: rows of the longest pack."""
        unit = cfg["make_sequence_length_divisible_by"]
        return cls(*_get_pack_sequence_parameters_for_megatron(cfg["megatron_cfg"], unit, longest))

    def padded_lens(self, lengths: Sequence[int]) -> list[int]:
        """Rows of each sequence in upstream's pack."""
        padded = [_up(length, self.sequence_multiple) for length in lengths]
        total = self.pack_size if self.pack_size is not None else _up(sum(padded), self.pack_multiple)
        padded[-1] += total - sum(padded)
        return padded


def _packed(one: Any, pad: Padding, cp_size: int, cp_rank: int, device) -> DraftBatch:
    lengths = one["input_lengths"].tolist()
    padded = pad.padded_lens(lengths)
    if cp_size == 1:
        layout = PackedLayout(lengths, device=device)
        starts = tuple(sum(padded[:i]) for i in range(len(padded)))
    else:
        # Ranks own the rows that upstream's zigzag gives them, so the padding is upstream's; the last sequence's extra
        # padding counts as its own, unsupervised, tokens.
        layout = PackedLayout(
            [*lengths[:-1], padded[-1]],
            cp_size=cp_size,
            cp_rank=cp_rank,
            pad_multiple=pad.sequence_multiple,
            device=device,
        )
        starts = None
    return DraftBatch(
        layout,
        *_tokens_and_mask(one, lengths, layout, device),
        sample_ids=_sample_ids(one, lengths),
        starts=starts,
        unpacked_size=None,
        forward_rows=sum(padded) // cp_size,
    )


def _unpacked(one: Any, device) -> DraftBatch:
    size, columns = one["input_ids"].shape
    lengths = one["input_lengths"].tolist()
    layout = PackedLayout(lengths, device=device)
    return DraftBatch(
        layout,
        *_tokens_and_mask(one, lengths, layout, device),
        sample_ids=_sample_ids(one, lengths),
        starts=tuple(columns * i for i in range(size)),
        unpacked_size=size,
        forward_rows=size * columns,
    )


def _tokens_and_mask(one: Any, lengths: list[int], layout: PackedLayout, device) -> Iterator[torch.Tensor]:
    mask = (one["token_mask"] * one["sample_mask"].unsqueeze(-1)) != 0
    for rows, dtype in ((one["input_ids"], torch.long), (mask, torch.float32)):
        pieces = [
            torch.nn.functional.pad(row[:length].to(dtype), (0, wanted - length))
            for row, length, wanted in zip(rows, lengths, layout.seq_lens, strict=True)
        ]
        yield layout.pack([piece.to(device) for piece in pieces])


def _sample_ids(one: Any, lengths: list[int]) -> tuple[int, ...]:
    ids = one["input_ids"].cpu()
    digests = (
        hashlib.blake2b(row[:length].numpy().tobytes(), digest_size=7) for row, length in zip(ids, lengths, strict=True)
    )
    return tuple(int.from_bytes(digest.digest(), "big") for digest in digests)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
