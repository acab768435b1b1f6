"""The tensors of a block draft's checkpoint: their shapes. Needs neither torch nor Megatron."""

from nemo_ext.drafts.block_config import BlockConfig


def block_shapes(cfg: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every floating-point tensor by name, in vLLM's form (contract D.1)."""
    hidden, ffn = cfg.hidden_size, cfg.intermediate_size
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(cfg.tap_layers) * hidden),
        "hidden_norm.weight": (hidden,),
    }
    for index in range(cfg.num_layers):
        at = f"layers.{index}."
        shapes |= {
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "self_attn.q_norm.weight": (cfg.head_dim,),
            at + "self_attn.k_norm.weight": (cfg.head_dim,),
            at + "mlp.gate_proj.weight": (ffn, hidden),
            at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["norm.weight"] = (hidden,)
    if cfg.reduced_vocab:
        shapes["lm_head.weight"] = (cfg.draft_vocab_size, hidden)
    if cfg.kind == "dspark":
        shapes["markov_head.markov_w1.weight"] = (cfg.vocab_size, cfg.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (cfg.draft_vocab_size, cfg.markov_rank)
    if cfg.confidence_head:
        features = hidden + (cfg.markov_rank if cfg.confidence_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, features)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
