"""Rotary position embedding of queries and keys in one kernel, forward and backward.

(a, b) = (x_i, x_{i+H/2}) -> (a cos - b sin, b cos + a sin), by the angle position * theta^(-2i/H).
Frequencies are rounded from float64 once; angle, sine and cosine are float32 with full range
reduction. The backward is the rotation by minus the angle: the same program. Source: Su et al.
2021, section 3.2.2, half-split pairing.
"""

import functools
from typing import Any

import tilelang.language as T
import torch
from tilelang.layout import Fragment
from torch import Tensor

from candidates.tilelang.dialect import (
    NAMESPACE,
    Dialect,
    dense,
    dialect_of,
    dtype_name,
    launch,
    launches_of,
)

THREADS = 128
HEADS = 2  # that a block rotates by the same angles: with more registers run out
LOAD = 8  # elements of a 16-byte load of a 16-bit dtype
LARGEST_WIDTH = 2 * THREADS * LOAD  # of a head


def _tile(d: Dialect, half: int) -> tuple[int, int, int]:
    """Heads and tokens of a block, and its padded half of a head: one load for every thread."""
    if not d.on_gpu:
        return 1, 1, half
    padded = max(LOAD, 1 << (half - 1).bit_length())
    return HEADS, THREADS * LOAD // padded, padded


def _thread_and_register(padded: int) -> Any:
    """A row-major tile dealt out in whole loads: the layout that 16-byte copies of x have."""
    return lambda t, i: ((t * padded + i) // LOAD, i % LOAD)


def rope_rotate(
    d: Dialect, num_query_heads: int, num_kv_heads: int, width: int, dtype: str, backwards: bool
) -> Any:
    """Rotates q [num_tokens, N, H] and k [num_tokens, K, H], by minus the angle if `backwards`.

    Number of heads 0: known at launch.
    """
    half = width // 2
    heads, tokens, padded = _tile(d, half)
    num_queries = num_query_heads or T.dynamic("num_query_heads")
    num_keys = num_kv_heads or T.dynamic("num_kv_heads")
    query_groups = T.ceildiv(num_queries, heads)
    groups = query_groups + T.ceildiv(num_keys, heads)
    sign = -1.0 if backwards else 1.0
    num_tokens = T.dynamic("num_tokens")

    by_loads = Fragment((tokens, padded), _thread_and_register(padded))

    @T.macro
    def load(x, a, b, first, head):  # type: ignore[no-untyped-def]
        for n, t, i in d.each(heads, tokens, padded):
            a[n, t, i] = x[first + t, head + n, i]
        for n, t, i in d.each(heads, tokens, padded):
            b[n, t, i] = x[first + t, head + n, half + i]

    @T.macro
    def store(a, b, y, first, head):  # type: ignore[no-untyped-def]
        for n, t, i in d.each(heads, tokens, padded):
            if i < half:
                y[first + t, head + n, i] = a[n, t, i]
        for n, t, i in d.each(heads, tokens, padded):
            if i < half:
                y[first + t, head + n, half + i] = b[n, t, i]

    @T.prim_func
    def program(
        q: T.Tensor((num_tokens, num_queries, width), dtype),
        k: T.Tensor((num_tokens, num_keys, width), dtype),
        positions: T.Tensor((num_tokens,), "int64"),
        frequencies: T.Tensor((half,), "float32"),
        rotated_q: T.Tensor((num_tokens, num_queries, width), dtype),
        rotated_k: T.Tensor((num_tokens, num_keys, width), dtype),
    ):
        with d.grid(T.ceildiv(num_tokens, tokens) * groups, num_threads=THREADS) as block:
            # All heads of some tokens, then of the next: they lie side by side.
            first, group = block // groups * tokens, block % groups
            a = d.registers((heads, tokens, padded), dtype)
            b = d.registers((heads, tokens, padded), dtype)
            cosine = d.registers((tokens, padded), "float32")
            sine = d.registers((tokens, padded), "float32")
            if d.on_gpu:
                T.annotate_layout({cosine: by_loads, sine: by_loads})
            # The loads are on their way while the angles are computed.
            if group < query_groups:
                load(q, a, b, first, group * heads)
            else:
                load(k, a, b, first, (group - query_groups) * heads)
            for t, i in d.each(tokens, padded):
                angle = T.cast(positions[first + t], "float32") * frequencies[i]
                cosine[t, i] = T.cos(angle)
                sine[t, i] = T.sin(angle) * sign
            for n, t, i in d.each(heads, tokens, padded):
                wide_a, wide_b = T.cast(a[n, t, i], "float32"), T.cast(b[n, t, i], "float32")
                a[n, t, i] = T.cast(wide_a * cosine[t, i] - wide_b * sine[t, i], dtype)
                b[n, t, i] = T.cast(wide_b * cosine[t, i] + wide_a * sine[t, i], dtype)
            if group < query_groups:
                store(a, b, rotated_q, first, group * heads)
            else:
                store(a, b, rotated_k, first, (group - query_groups) * heads)

    return program


@functools.cache
def _frequencies(theta: float, width: int, device: torch.device) -> Tensor:
    """theta^(-2i/H) for i in [0, H/2): float64 rounded once to float32."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return (theta**-exponent).to(torch.float32).to(device)


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, theta: float, backwards: bool
) -> tuple[Tensor, Tensor]:
    rotated_q, rotated_k = q.new_empty(q.shape), k.new_empty(k.shape)
    (B, T_, N, H), K = q.shape, k.shape[2]
    if q.numel():
        d = dialect_of(q)
        heads = (N, K) if d.on_gpu else (0, 0)
        launch(
            rope_rotate, d, (*heads, H, dtype_name("rope", q), backwards),
            dense(q).view(B * T_, N, H), dense(k).view(B * T_, K, H), dense(positions).view(-1),
            _frequencies(theta, H, q.device), rotated_q.view(B * T_, N, H),
            rotated_k.view(B * T_, K, H),
        )  # fmt: skip
    return rotated_q, rotated_k


@torch.library.custom_op(f"{NAMESPACE}::rope", mutates_args=())
def _rope(q: Tensor, k: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, positions, theta, backwards=False)


@_rope.register_fake
def _(q: Tensor, k: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op(f"{NAMESPACE}::rope_backward", mutates_args=())
def _rope_backward(
    dq: Tensor, dk: Tensor, positions: Tensor, theta: float
) -> tuple[Tensor, Tensor]:
    return _rotate(dq, dk, positions, theta, backwards=True)


@_rope_backward.register_fake
def _(dq: Tensor, dk: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.theta = inputs[3]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_rope_backward(dq, dk, *ctx.saved_tensors, ctx.theta), None, None


_rope.register_autograd(_differentiate, setup_context=_keep)


def _require(q: Tensor, k: Tensor, positions: Tensor) -> None:
    dtype_name("rope", q)
    if q.ndim != 4 or k.ndim != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q and k must be [B,T,N,H] and [B,T,K,H], got {list(q.shape)} and {list(k.shape)}"
        )
    if k.dtype != q.dtype or {k.device, positions.device} != {q.device}:
        raise ValueError(
            f"q and k must share a dtype, and a device with positions, got {q.dtype} on "
            f"{q.device}, {k.dtype} on {k.device}, positions on {positions.device}"
        )
    if positions.shape != q.shape[:2] or positions.dtype != torch.int64:
        raise ValueError(
            f"positions must be int64 {list(q.shape[:2])}, got {positions.dtype} "
            f"{list(positions.shape)}"
        )
    if not min(q.shape[2], k.shape[2]):
        raise ValueError(f"q and k must have heads, got {list(q.shape)} and {list(k.shape)}")
    if q.shape[3] % 2 or not 2 <= q.shape[3] <= LARGEST_WIDTH:
        raise ValueError(
            f"RoPE rotates pairs: the head width must be even, 2 to {LARGEST_WIDTH}, "
            f"got {q.shape[3]}"
        )


def rope(q: Tensor, k: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """q [B,T,N,H] and k [B,T,K,H] rotated by positions [B,T] int64 * theta^(-2i/H).

    Raises ValueError if the head width is odd or over LARGEST_WIDTH, if q or k has no heads, if
    shapes, dtypes or devices do not fit, or if the device does not take the dtype.
    """
    _require(q, k, positions)
    rotated_q, rotated_k = _rope(q, k, positions, theta)
    return rotated_q, rotated_k


rope.kernel_calls = launches_of("rope_rotate")
