"""EAGLE-3 with training-time test (TTT), contract A.1 to A.4.

Legend: T rows of this rank, K tapped layers, h policy hidden size, H draft hidden size, P passes, N heads, D head dim,
U this rank's shard of the draft vocabulary.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_ext.attention import gather_trunk, resident_bytes, ttt_attention
from nemo_ext.drafts.eagle3_config import Eagle3Config
from nemo_ext.drafts.layers import Linear, RMSNorm, Rotary, key_linear, local_key_heads
from nemo_ext.layout import PackedLayout


class Eagle3Layer(nn.Module):
    """One decoder layer. Layer 0 reads the token's embedding beside the feature; the others read the feature alone."""

    def __init__(self, cfg: Eagle3Config, index: int, config, tp_group):
        super().__init__()
        self.first = index == 0
        self.cfg = cfg
        in_size = 2 * cfg.hidden_size if self.first else cfg.hidden_size
        heads = cfg.num_heads * cfg.head_dim
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if self.first:
            self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.q_proj = Linear(in_size, heads, "column", config, tp_group)
        self.k_proj = key_linear(in_size, cfg.num_kv_heads, cfg.head_dim, config, tp_group)
        self.v_proj = key_linear(in_size, cfg.num_kv_heads, cfg.head_dim, config, tp_group)
        self.o_proj = Linear(heads, cfg.hidden_size, "row", config, tp_group)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, "column", config, tp_group)
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, "column", config, tp_group)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, "row", config, tp_group)

    def forward(self, embed_TH, feature_TH, rotary_table, attend):
        """`attend(q_TND, k_TND, v_TND) -> out_TND`. Returns the layer's output with the residual added."""
        if self.first:
            normed_TH = self.hidden_norm(feature_TH)
            residual_TH = normed_TH if self.cfg.norm_before_residual else feature_TH
            x = torch.cat((self.input_layernorm(embed_TH), normed_TH), dim=-1)
        else:
            residual_TH = feature_TH
            x = self.input_layernorm(feature_TH)
        q_TND, k_TND, v_TND = (
            proj(x).unflatten(-1, (-1, self.cfg.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_TND = attend(Rotary.rotate(q_TND, rotary_table), Rotary.rotate(k_TND, rotary_table), v_TND)
        residual_TH = residual_TH + self.o_proj(out_TND.flatten(-2))
        x = self.post_attention_layernorm(residual_TH)
        return residual_TH + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Draft(nn.Module):
    """The draft. Its input is the policy's, detached; it owns `fc`, its layers, its final norm and its LM head.

    Args:
        cfg: shape and flags.
        config: the policy's Megatron `TransformerConfig` (dtype, parallel sizes).
        tp_group: tensor-parallel group; None looks it up as Megatron's layers do.
    """

    def __init__(self, cfg: Eagle3Config, config, tp_group=None):
        super().__init__()
        # Taps arrive whole, so the draft itself is not sequence parallel.
        config = dataclasses.replace(config, sequence_parallel=False, perform_initialization=False)
        self.cfg = cfg
        self._key_heads = local_key_heads(cfg.num_kv_heads, tp_group)
        if cfg.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(cfg.hidden_size, cfg.rms_norm_eps) for _ in cfg.tap_layers)
        if cfg.norm_before_fc:
            self.input_norm = RMSNorm(len(cfg.tap_layers) * cfg.hidden_size, cfg.rms_norm_eps)
        self.fc = nn.Linear(len(cfg.tap_layers) * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(cfg, i, config, tp_group) for i in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.draft_vocab_size, "column", config, tp_group)
        self.rotary = Rotary(cfg.head_dim, cfg.rope_theta)
        self.to(config.params_dtype)
        # Which target ids the draft's vocabulary stands for; a constant, so not a parameter.
        self.register_buffer("target_ids_U", torch.arange(cfg.draft_vocab_size), persistent=False)

    def fuse(self, taps_TK: torch.Tensor) -> torch.Tensor:
        """`fc` over the concatenated taps `[T, K * h]`: the feature that pass 1 starts from."""
        if self.cfg.norm_before_fc:
            taps_TK = self.input_norm(taps_TK)
        if self.cfg.fc_norm:
            parts = taps_TK.chunk(len(self.cfg.tap_layers), dim=-1)
            taps_TK = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps_TK)

    def forward(
        self,
        taps_TK: torch.Tensor,
        embeds_PTH: torch.Tensor,
        layout: PackedLayout,
        *,
        cp_group=None,
        recompute: bool = False,
        trunk_budget: float = 0.0,
    ) -> torch.Tensor:
        """All passes. Row `i` of pass `d` reads the embedding of token `i + d` and the feature that pass `d - 1` left at
        row `i`; it attends pass-1 keys of rows `<= i` of its sequence and its own keys of passes 2 to `d`.

        Args:
            taps_TK: `[T, K * h]`, taps in ascending layer order.
            embeds_PTH: `[P, T, H]`, embedding of the token `d` rows ahead, for `d` from 1 (anything where there is none).
            layout: rows of this rank.
            recompute: keep only the inputs of each pass and run it again in the backward.
            trunk_budget: bytes per rank that a resident trunk may take. A trunk that fits is received once, in pass 1,
                and kept (pass 1 is then not recomputed); one that does not goes round the ring in every pass.

        Returns:
            `[T, P, H]`, after the final norm: what the LM head reads.
        """
        feature_TH = self.fuse(taps_TK)
        kv: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]  # per layer, per pass
        trunks = _Trunks(layout, cp_group, self._resident(layout, len(embeds_PTH), feature_TH.dtype, trunk_budget))
        outputs = []
        for number, embed_TH in enumerate(embeds_PTH):
            args = (embed_TH, feature_TH, number, layout, cp_group, trunks, *_flatten(kv))
            if recompute and torch.is_grad_enabled() and not (trunks.resident and number == 0):
                feature_TH, output_TH, *new = checkpoint(self._one_pass, *args, use_reentrant=False)
            else:
                feature_TH, output_TH, *new = self._one_pass(*args)
            for layer, key, value in zip(kv, new[::2], new[1::2], strict=True):
                layer.append((key, value))
            outputs.append(output_TH)
        return torch.stack(outputs, dim=1)

    def _resident(self, layout: PackedLayout, passes: int, dtype: torch.dtype, budget: float) -> bool:
        if layout.cp_size == 1 or passes == 1:
            return False
        return resident_bytes(layout, self._key_heads, self.cfg.head_dim, dtype, len(self.layers)) <= budget

    def _one_pass(self, embed_TH, feature_TH, number, layout, cp_group, trunks, *flat_kv):
        """Pass `number` (from 0); a pure function of its arguments, so that it can be recomputed (but for pass 0 of
        a resident trunk, which fills `trunks`)."""
        table = self.rotary.table(layout.local_positions + number, feature_TH.dtype)
        passes = [_unflatten(flat_kv, number, index) for index in range(len(self.layers))]
        new: list[torch.Tensor] = []
        x_TH = feature_TH
        for index, (layer, seen) in enumerate(zip(self.layers, passes, strict=True)):

            def attend(q_TND, k_TND, v_TND, index=index, seen=seen):
                new.extend((k_TND, v_TND))
                keys, values = zip(*seen, (k_TND, v_TND), strict=True)
                return ttt_attention(
                    q_TND,
                    keys[0],
                    values[0],
                    _stack(keys[1:], k_TND),
                    _stack(values[1:], v_TND),
                    layout=layout,
                    group=cp_group,
                    resident=trunks.of_layer(index, keys[0], values[0]),
                )

            x_TH = layer(embed_TH, x_TH, table, attend)
        output_TH = self.norm(x_TH)
        return (output_TH if self.cfg.norm_output else x_TH), output_TH, *new


class _Trunks:
    """The resident trunk of each layer, gathered when pass 1 first attends it; none when `resident` is false."""

    def __init__(self, layout: PackedLayout, cp_group, resident: bool):
        self.resident = resident
        self._layout, self._group = layout, cp_group
        self._of_layer = {}

    def of_layer(self, index: int, key_TND: torch.Tensor, value_TND: torch.Tensor):
        if self.resident and index not in self._of_layer:
            self._of_layer[index] = gather_trunk(key_TND, value_TND, layout=self._layout, group=self._group)
        return self._of_layer.get(index)


def _stack(passes, like_TND):
    """Branch keys `[T, passes, N, D]`; none in pass 1."""
    return torch.stack(passes, dim=1) if passes else like_TND.new_zeros(like_TND.shape[0], 0, *like_TND.shape[1:])


def _flatten(kv):
    return [tensor for layer in kv for pair in layer for tensor in pair]


def _unflatten(flat, passes, index):
    own = flat[2 * passes * index : 2 * passes * (index + 1)]
    return list(zip(own[::2], own[1::2], strict=True))
