"""The pieces of a Llama or Qwen3 decoder layer, over Hugging Face names.

Legend: ... any leading axes, R rows, H hidden size, A heads, D head size.
"""

import torch


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def linear(x, weights, name):
    """x W^T of the bias-free projection `name`."""
    return x @ weights[f"{name}.weight"].T


def split_heads(x, head_dim):
    """[..., A * D] -> [..., A, D]."""
    return x.unflatten(-1, (-1, head_dim))


def swiglu(x, weights, prefix):
    """down(silu(gate(x)) * up(x)) of the layer whose names start with `prefix`."""
    gate = linear(x, weights, f"{prefix}mlp.gate_proj")
    up = linear(x, weights, f"{prefix}mlp.up_proj")
    return linear(gate * torch.sigmoid(gate) * up, weights, f"{prefix}mlp.down_proj")


def rope(x_RAD, position_R, cfg):
    """Rotate head halves (NeoX layout): feature k pairs with k + D/2 and turns by position * theta^(-2k/D).

    The angles are float64 from cfg["rope_theta"], unless cfg["inv_freq"] [D/2] is given: then that table is used, and
    angle, cosine and sine are taken in its dtype (a float32 table mimics serving).
    """
    half = x_RAD.shape[-1] // 2
    inv_freq = cfg.get("inv_freq")
    if inv_freq is None:
        exponent = torch.arange(half, dtype=torch.float64, device=x_RAD.device) / half
        inv_freq = float(cfg["rope_theta"]) ** -exponent
    angle_R1K = (position_R[:, None] * inv_freq).unsqueeze(1)
    cos, sin = angle_R1K.cos().to(x_RAD.dtype), angle_R1K.sin().to(x_RAD.dtype)
    first, second = x_RAD[..., :half], x_RAD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
