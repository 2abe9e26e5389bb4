"""The operators of a decoder layer, each as its plain formula.

Every operator takes any float dtype, computes in promote(dtype, float32) and rounds once, at the
end, to the dtype it was given: what comes back differs from the exact value by one rounding and the
float32 arithmetic. In float64 the same formulas are the oracle.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """promote(dtype, float32): float32 for the 16-bit formats, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] and y [..., D] share a dtype; weight [D] may be wider than x and is not rounded to
    it. The gain is multiplied before the one rounding (the order of Gemma, not of Llama).

    Raises ValueError if weight is not [D]. Source: Zhang and Sennrich 2019, equation 4.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}] for x {list(x.shape)}, got "
                         f"{list(weight.shape)}")  # fmt: skip
    wide = x.to(arithmetic_dtype(x.dtype))
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded once to their dtype; y = rms_norm(total, weight, eps).

    x, residual, y and total [..., D] share a dtype; weight [D]. y is the norm of the rounded total,
    so that what is normalised is what the residual stream carries on. Returns (y, total).

    Raises ValueError if x and residual differ in shape or dtype, or weight is not [D].
    Source: the residual addition and the norm that follows it in a pre-norm decoder layer.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"x and residual must be alike, got {x.dtype} {list(x.shape)} and "
                         f"{residual.dtype} {list(residual.shape)}")  # fmt: skip
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(
    q_BTNH: Tensor, k_BTKH: Tensor, positions_BT: Tensor, theta: float
) -> tuple[Tensor, Tensor]:
    """Rotates component pairs (i, i + H/2) of every head by the angle positions * theta^(-2i/H).

    (x_i, x_{i+H/2}) -> (x_i cos - x_{i+H/2} sin, x_{i+H/2} cos + x_i sin), so that a dot product of
    a rotated query and key depends on the difference of their positions alone. Positions are int64
    and any integer is a position; angles, sines and cosines are in promote(q.dtype, float32).

    Raises ValueError if positions are not [B, T] integers or H is odd. Source: Su et al. 2021,
    section 3.2.2, with the half-split pairing of Llama and Qwen2.
    """
    head_width = q_BTNH.shape[-1]
    if positions_BT.shape != q_BTNH.shape[:2] or positions_BT.is_floating_point():
        raise ValueError(f"positions must be integers {list(q_BTNH.shape[:2])}, got "
                         f"{positions_BT.dtype} {list(positions_BT.shape)}")  # fmt: skip
    if head_width % 2:
        raise ValueError(f"RoPE rotates pairs: the head width must be even, got {head_width}")
    dtype = arithmetic_dtype(q_BTNH.dtype)
    exponent = torch.arange(0, head_width, 2, device=q_BTNH.device, dtype=dtype) / head_width
    angles_BTh = positions_BT[..., None].to(dtype) * theta**-exponent
    cos, sin = angles_BTh.cos()[:, :, None], angles_BTh.sin()[:, :, None]
    return _rotate(q_BTNH, cos, sin), _rotate(k_BTKH, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None
) -> Tensor:
    """o = softmax(q k^T / sqrt(H)) v over the tokens up to one's own in one's own document.

    Query head n reads key/value head n // (N // K). Tokens whose `documents_BT` (any integer ids)
    differ do not see each other; None is one document a row. A masked weight is exactly zero, and
    so is its gradient. o is [B, T, N, H] in q's dtype.

    Raises ValueError on shapes that do not fit. Source: Vaswani et al. 2017, equation 1; Ainslie et
    al. 2023 (grouped queries).
    """
    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    if k_BTKH.shape != (B, T, K, H) or v_BTKH.shape != (B, T, K, H) or N % K:
        raise ValueError(f"q, k and v must be [B,T,N,H], [B,T,K,H] and [B,T,K,H] with K dividing "
                         f"N, got {[list(x.shape) for x in (q_BTNH, k_BTKH, v_BTKH)]}")  # fmt: skip
    visible = None  # of every earlier token and one's own: the flag is_causal
    if documents_BT is not None:
        if documents_BT.shape != (B, T):
            raise ValueError(f"documents must be {[B, T]}, got {list(documents_BT.shape)}")
        causal = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
        same_document = documents_BT[:, :, None] == documents_BT[:, None, :]
        visible = (causal & same_document)[:, None]
    dtype = arithmetic_dtype(q_BTNH.dtype)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    k, v = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    # CUDA's fused kernels make a float32 product of three in TF32, and take few strides.
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
        o_BNTH = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None)
    return o_BNTH.transpose(1, 2).to(q_BTNH.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """h = silu(gate) * up, with silu(z) = z / (1 + exp(-z)); gate, up and h are [..., F].

    Source: Shazeer 2020, equation 6.
    """
    dtype = arithmetic_dtype(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x weight^T + bias: x [..., I], weight [O, I], bias [O] or None, y [..., O].

    16-bit products are accumulated in float32 by torch's own matrix product.
    """
    return F.linear(x, weight, bias)


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """y_i = x weight_i^T + bias_i: linear layers that read one input, such as q, k and v.

    x [..., I], weight_i [O_i, I], bias_i [O_i] or None, y_i [..., O_i]. The gradient of x is the
    sum of dy_i weight_i, which an implementation of its own need not pass over memory for.

    Raises ValueError if there is not one bias, or None, for each of one or more weights.
    """
    if not weights or len(weights) != len(biases):
        raise ValueError(f"there must be one bias or None for each of one or more weights, got "
                         f"{len(weights)} weights and {len(biases)} biases")  # fmt: skip
    return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """h = swiglu(x gate_weight^T, x up_weight^T); x [..., I], weights [F, I], h [..., F].

    Nobody else sees the two products, so an implementation of its own may use their memory for
    their gradients. Source: Shazeer 2020, equation 6, without biases.
    """
    return swiglu(linear(x, gate_weight, None), linear(x, up_weight, None))
