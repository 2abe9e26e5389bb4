"""Causal attention with grouped queries and document boundaries, forward and backward.

The programs are in attention_kernels.py, for every machine, and attention_hopper.py, for 16-bit
heads of width 64 and 128 on a Hopper GPU. Saved for the backward are q, k, v, o and the log-sum-exp
of each row.
"""

from typing import Any

import torch
from torch import Tensor

from candidates.tilelang.attention_backward import (
    attention_backward_keys,
    attention_backward_queries,
    attention_delta,
)
from candidates.tilelang.attention_hopper import HOPPER_WIDTHS, ROWS, hopper_forward
from candidates.tilelang.attention_hopper_backward import hopper_backward
from candidates.tilelang.attention_hopper_queries import (
    hopper_backward_queries,
    hopper_round_queries,
)
from candidates.tilelang.attention_kernels import attention_forward, document_ranges, tile
from candidates.tilelang.dialect import (
    NAMESPACE,
    Dialect,
    dense,
    dialect_of,
    dtype_name,
    launch,
    launches_of,
)

LARGEST_WIDTH = 256  # a query tile, a key tile and a value tile must fit into shared memory
ID_DTYPES = {torch.int32: "int32", torch.int64: "int64"}


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    """Raises ValueError, with the limit, for whatever the kernels do not take."""
    shapes = [list(x.shape) for x in (q, k, v)]
    fits = q.ndim == 4 and k.ndim == 4 and k.shape == v.shape
    if not fits or k.shape != (*q.shape[:2], k.shape[2], q.shape[3]):
        raise ValueError(f"q, k and v must be [B,T,N,H], [B,T,K,H] and [B,T,K,H], got {shapes}")
    heads, kv_heads, width = q.shape[2], k.shape[2], q.shape[3]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"K must divide N and neither may be 0, got N {heads} and K {kv_heads}")
    if not 1 <= width <= LARGEST_WIDTH:
        raise ValueError(f"attention takes heads of width 1 to {LARGEST_WIDTH}, got {width}")
    if any(x.dtype != q.dtype or x.device != q.device for x in (k, v)):
        kinds = [f"{x.dtype} on {x.device}" for x in (q, k, v)]
        raise ValueError(f"q, k and v must have one dtype and one device, got {kinds}")
    if documents is None:
        return
    if documents.shape != q.shape[:2] or documents.device != q.device:
        raise ValueError(
            f"documents must be {list(q.shape[:2])} on {q.device}, got {list(documents.shape)} on "
            f"{documents.device}"
        )
    if documents.dtype not in ID_DTYPES:
        raise ValueError(f"documents must be int32 or int64, got {documents.dtype}")


def _parameters(q: Tensor, k: Tensor, documents: Tensor | None) -> tuple[Any, ...]:
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    id_dtype = "int32" if documents is None else ID_DTYPES[documents.dtype]
    return heads, groups, q.shape[3], dtype_name("attention", q), documents is not None, id_dtype


def _is_hopper(d: Dialect, width: int, dtype: str) -> bool:
    return d.arch == "sm_90a" and dtype != "float32" and width in HOPPER_WIDTHS


def _tile(q: Tensor) -> int:
    """Tokens of a tile, to which the rows of the log-sum-exp are padded."""
    d, dtype = dialect_of(q), dtype_name("attention", q)
    return ROWS if _is_hopper(d, q.shape[3], dtype) else tile(d, q.shape[3], dtype)[0]


def _documents(q: Tensor, documents: Tensor | None) -> Tensor | None:
    """The ids. On a CPU None becomes one id: half as many kernels to compile."""
    if documents is None and not dialect_of(q).on_gpu:
        return q.new_zeros(q.shape[:2], dtype=torch.int32)
    return documents


def _ranges(q: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ids and what each tile needs. Without documents: two tensors that no kernel reads."""
    (batch, tokens), size = q.shape[:2], _tile(q)
    ranges = q.new_empty((batch, -(-tokens // size), 4), dtype=torch.int32)
    if documents is None:
        return q.new_empty(q.shape[:2], dtype=torch.int32), ranges
    documents = dense(documents)
    parameters = (size, ID_DTYPES[documents.dtype])
    launch(document_ranges, dialect_of(q), parameters, documents, ranges)
    return documents, ranges


def _rows(q: Tensor) -> Tensor:
    """A number for each head and token [B,N,T padded to tiles]."""
    (batch, tokens, heads, _), size = q.shape, _tile(q)
    return q.new_empty(batch, heads, -(-tokens // size) * size, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(q, k, v, documents)
    d, documents = dialect_of(q), _documents(q, documents)
    parameters = _parameters(q, k, documents)
    q, k, v = (dense(x) for x in (q, k, v))
    o, lse = q.new_empty(q.shape), _rows(q)
    if not q.numel():
        return o, lse
    inputs = (q, k, v, *_ranges(q, documents))
    if _is_hopper(d, q.shape[3], parameters[3]):
        num_tiles = lse.numel() // ROWS
        launch(hopper_forward, d, parameters, *inputs, o, lse, min(num_tiles, d.num_workers))
    else:
        launch(attention_forward, d, parameters, *inputs, o, lse)
    return o, lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _rows(q)


@torch.library.custom_op(f"{NAMESPACE}::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d, documents = dialect_of(q), _documents(q, documents)
    parameters = _parameters(q, k, documents)
    dout, q, k, v, o = (dense(x) for x in (dout, q, k, v, o))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if not q.numel():
        return dq, dk.zero_(), dv.zero_()
    heads, _, width, dtype = parameters[:4]
    delta = torch.empty_like(lse)
    launch(attention_delta, d, (heads, width, dtype, _tile(q)), o, dout, delta)
    inputs = (q, k, v, *_ranges(q, documents), dout, lse, delta)
    if not _is_hopper(d, width, dtype):
        launch(attention_backward_keys, d, parameters, *inputs, dk, dv)
        launch(attention_backward_queries, d, parameters, *inputs, dq)
    elif torch.are_deterministic_algorithms_enabled():
        launch(hopper_backward, d, (*parameters, False), *inputs, delta, dk, dv)
        launch(hopper_backward_queries, d, parameters, *inputs, dq)
    else:
        sums = torch.zeros(*lse.shape, width, dtype=torch.float32, device=q.device)
        launch(hopper_backward, d, (*parameters, True), *inputs, sums, dk, dv)
        launch(hopper_round_queries, d, (heads, width, dtype), dq, sums)
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp


def _differentiate(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None
    return *_attention_backward(dout, *ctx.saved_tensors), None


_attention.register_autograd(_differentiate, setup_context=_keep)


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """o [B,T,N,H] = softmax(q k^T / sqrt(H)) v over the earlier tokens of one's own document.

    q [B,T,N,H], k and v [B,T,K,H] of one dtype, K dividing N, H of 1 to LARGEST_WIDTH; documents
    [B,T] int32 or int64, any ids in any order, or None. Tiles wholly in the future or in other
    documents are skipped. A finite value in a token has no influence on the tokens that do not see
    it; one that sees one key only has a gradient of exactly zero towards q and k. The forward, dk
    and dv are bit-equal every time; so is dq, except on a Hopper GPU in 16 bits at H 64 and 128
    while torch's deterministic algorithms are off: there the key tiles add to dq in any order.

    Raises ValueError, naming the limit, for other shapes, widths, dtypes and devices.
    """
    o: Tensor = _attention(q, k, v, documents)[0]
    return o


attention.kernel_calls = launches_of(
    "document_ranges", "attention_forward", "attention_delta", "attention_backward_keys",
    "attention_backward_queries", "hopper_forward", "hopper_backward", "hopper_backward_queries",
    "hopper_round_queries",
)  # fmt: skip
