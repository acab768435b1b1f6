"""The policy's own attention under context parallelism, as a Megatron `core_attention` for a layer spec.

Megatron's local attention refuses context parallelism and knows no packs; with Transformer Engine the policy keeps
Transformer Engine's.

Legend: T this rank's rows, N query heads of this tensor-parallel rank, M its key heads, D head dim.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from nemo_ext.attention.functions import causal_attention
from nemo_ext.layout import PackedLayout


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a pack, with the layout that it was made from."""

    layout: PackedLayout | None = None

    @classmethod
    def of(cls, layout: PackedLayout) -> "PackedParams":
        """What Megatron's rotary embedding (padded `cu_seqlens`, THD format) and our attention need of a layout."""
        longest = max(layout.padded_lens, default=0)
        starts = layout.cu_seqlens_padded
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts,
            cu_seqlens_kv_padded=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=layout,
        )


class PackedCoreAttention(MegatronModule):
    """Causal attention over a pack; swap it into a spec: `layer.submodules.self_attention.submodules.core_attention`.

    Its arguments are those with which Megatron builds `core_attention`; the context-parallel group is
    `pg_collection.cp`.

    Raises:
        ValueError: for a configuration that this attention does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout is {dropout}; packed attention needs 0")
        if config.softmax_type != "vanilla":
            raise ValueError(f"softmax_type is {config.softmax_type!r}; packed attention needs 'vanilla'")
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attention_type is {attention_type!r} and attn_mask_type {attn_mask_type.name!r}; packed attention is "
                "'self' and 'causal'"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)
        self.window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            before, after = config.window_size
            if before < 0 or after != 0:
                raise ValueError(f"window_size is {config.window_size}; packed attention needs (rows before, 0)")
            self.window = before + 1

    def forward(
        self,
        query_TND: torch.Tensor,
        key_TMD: torch.Tensor,
        value_TMD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> torch.Tensor:
        """`[T, N * D]`. The pack's layout says who sees whom, so a mask or a bias is an error."""
        if not isinstance(packed_seq_params, PackedParams) or packed_seq_params.layout is None:
            raise ValueError(
                f"packed_seq_params is {type(packed_seq_params).__name__}; pass PackedParams.of(layout) to the model"
            )
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention_mask or attention_bias is given; packed attention takes None for both")
        out_TND = causal_attention(
            query_TND,
            key_TMD,
            value_TMD,
            layout=packed_seq_params.layout,
            group=self.cp_group,
            window=self.window,
            scale=self.scale,
        )
        return out_TND.flatten(1)
