"""The TileLang programs of attention's backward, the same text for the CPU and CUDA.

The weights are computed again from L: P = 2^(c S - L). With delta = rowsum(o dout),
dS = P (dout v^T - delta), dv = P^T dout, dk = dS^T q / sqrt(H), dq = dS k / sqrt(H). One program
sums dk and dv over the query tiles and the heads of a group, another dq over the key tiles: no
atomics, the same bits every time. Source: Dao 2023 (FlashAttention-2), algorithm 2.
"""

import math
from typing import Any

import tilelang.language as T

from candidates.tilelang.attention_kernels import (
    LOG2_E,
    PLAIN,
    loop_stages,
    operand,
    products,
    tile,
    visible,
)
from candidates.tilelang.dialect import Dialect


def _below_one(mass: Any) -> Any:
    """The least weight 2^(c S - L) that is one but for the rounding of L.

    Such a weight is alone in its row, so its slope is zero: exactly, although dout v^T and
    rowsum(o dout) are summed in different orders.
    """
    return 1.0 - 2.0**-23 * (2.0 + T.max(mass, -mass))


def attention_delta(d: Dialect, heads: int, width: int, dtype: str, size: int) -> Any:
    """delta [B,N,T padded to `size`] float32 = sum over H of o dout, both [B,T,N,H]."""
    padded = 2 ** (width - 1).bit_length() if d.on_gpu else width  # else no layout is found
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        o: T.Tensor((batch, tokens, heads, width), dtype),
        dout: T.Tensor((batch, tokens, heads, width), dtype),
        delta: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
    ):
        with d.grid(T.ceildiv(tokens, size), heads, batch) as (block, head, row):
            left, right = d.registers((size, padded), dtype), d.registers((size, padded), dtype)
            wide = d.registers((size, padded), "float32")
            result = d.registers((size,), "float32")
            begin = block * size
            T.copy(o[row, begin : begin + size, head, 0:padded], left)
            T.copy(dout[row, begin : begin + size, head, 0:padded], right)
            for i, j in d.each(size, padded):
                wide[i, j] = T.cast(left[i, j], "float32") * T.cast(right[i, j], "float32")
            T.reduce_sum(wide, result, dim=1)
            T.copy(result, delta[row, head, begin : begin + size], annotations=PLAIN)

    return program


def attention_backward_queries(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    stages: int = 2,
) -> Any:  # fmt: skip
    """dq [B,T,N,H]: for each query tile the sum over the key tiles it sees."""
    size, padded = tile(d, width, dtype)
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    product, product_transposed = products(d, dtype)
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        q: T.Tensor((batch, tokens, heads, width), dtype),
        k: T.Tensor((batch, tokens, kv_heads, width), dtype),
        v: T.Tensor((batch, tokens, kv_heads, width), dtype),
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, size), 4), "int32"),
        dout: T.Tensor((batch, tokens, heads, width), dtype),
        lse: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
        delta: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
        dq: T.Tensor((batch, tokens, heads, width), dtype),
    ):
        with d.grid(T.ceildiv(tokens, size), heads, batch) as (block, head, row):
            queries, cotangents = d.shared((size, padded), dtype), d.shared((size, padded), dtype)
            keys, values = d.shared((size, padded), dtype), d.shared((size, padded), dtype)
            query_ids, key_ids = d.registers((size,), id_dtype), d.shared((size,), id_dtype)
            scores = d.registers((size, size), "float32")
            slopes = d.registers((size, size), "float32")
            weights = operand(d, (size, size), dtype)
            total = d.registers((size, padded), "float32")
            mass, mean = d.registers((size,), "float32"), d.registers((size,), "float32")
            begin = block * size
            T.copy(q[row, begin : begin + size, head, 0:padded], queries)
            T.copy(dout[row, begin : begin + size, head, 0:padded], cotangents)
            T.copy(lse[row, head, begin : begin + size], mass, annotations=PLAIN)
            T.copy(delta[row, head, begin : begin + size], mean, annotations=PLAIN)
            if packed:
                T.copy(documents[row, begin : begin + size], query_ids, annotations=PLAIN)
            T.fill(total, 0)
            start = T.floordiv(ranges[row, block, 0], size) if packed else 0
            for step in d.pipelined(start, block + 1, num_stages=loop_stages(width, dtype, stages)):
                seen = step * size
                T.copy(k[row, seen : seen + size, head // groups, 0:padded], keys)
                T.copy(v[row, seen : seen + size, head // groups, 0:padded], values)
                if packed:
                    T.copy(documents[row, seen : seen + size], key_ids, annotations=PLAIN)
                T.fill(scores, 0)
                product_transposed(queries, keys, scores)
                T.fill(slopes, 0)
                product_transposed(cotangents, values, slopes)
                for i, j in d.each(size, size):
                    scores[i, j] = T.exp2(scores[i, j] * scale - mass[i])
                for i, j in d.each(size, size):
                    slopes[i, j] = T.if_then_else(
                        T.And(
                            visible(packed, begin + i, seen + j, query_ids, key_ids, i, j),
                            scores[i, j] < _below_one(mass[i]),
                        ),
                        scores[i, j] * (slopes[i, j] - mean[i]),
                        0.0,
                    )
                T.copy(slopes, weights)
                product(weights, keys, total)
            for i, j in d.each(size, padded):
                total[i, j] = total[i, j] * (scale / LOG2_E)
            T.copy(total, dq[row, begin : begin + size, head, 0:padded])

    return program


def attention_backward_keys(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    stages: int = 2,
) -> Any:  # fmt: skip
    """dk and dv [B,T,K,H]: for each key tile the sum over the group's heads and the query tiles."""
    size, padded = tile(d, width, dtype)
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    product, product_transposed = products(d, dtype)
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        q: T.Tensor((batch, tokens, heads, width), dtype),
        k: T.Tensor((batch, tokens, kv_heads, width), dtype),
        v: T.Tensor((batch, tokens, kv_heads, width), dtype),
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, size), 4), "int32"),
        dout: T.Tensor((batch, tokens, heads, width), dtype),
        lse: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
        delta: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
        dk: T.Tensor((batch, tokens, kv_heads, width), dtype),
        dv: T.Tensor((batch, tokens, kv_heads, width), dtype),
    ):
        with d.grid(T.ceildiv(tokens, size), kv_heads, batch) as (block, kv_head, row):
            queries, cotangents = d.shared((size, padded), dtype), d.shared((size, padded), dtype)
            keys, values = d.shared((size, padded), dtype), d.shared((size, padded), dtype)
            query_ids, key_ids = d.shared((size,), id_dtype), d.registers((size,), id_dtype)
            mass, mean = d.shared((size,), "float32"), d.shared((size,), "float32")
            scores = d.registers((size, size), "float32")  # of keys by queries
            slopes = d.registers((size, size), "float32")
            weights = operand(d, (size, size), dtype)
            dkeys = d.registers((size, padded), "float32")
            dvalues = d.registers((size, padded), "float32")
            seen = block * size
            T.copy(k[row, seen : seen + size, kv_head, 0:padded], keys)
            T.copy(v[row, seen : seen + size, kv_head, 0:padded], values)
            if packed:
                T.copy(documents[row, seen : seen + size], key_ids, annotations=PLAIN)
            T.fill(dkeys, 0)
            T.fill(dvalues, 0)
            stop = T.ceildiv(ranges[row, block, 2] if packed else tokens, size)
            for step in d.pipelined(
                0, (stop - block) * groups, num_stages=loop_stages(width, dtype, stages)
            ):
                head = kv_head * groups + step // (stop - block)
                begin = (block + step % (stop - block)) * size
                T.copy(q[row, begin : begin + size, head, 0:padded], queries)
                T.copy(dout[row, begin : begin + size, head, 0:padded], cotangents)
                T.copy(lse[row, head, begin : begin + size], mass, annotations=PLAIN)
                T.copy(delta[row, head, begin : begin + size], mean, annotations=PLAIN)
                if packed:
                    T.copy(documents[row, begin : begin + size], query_ids, annotations=PLAIN)
                T.fill(scores, 0)
                product_transposed(keys, queries, scores)
                for i, j in d.each(size, size):
                    scores[i, j] = T.if_then_else(
                        visible(packed, begin + j, seen + i, query_ids, key_ids, j, i),
                        T.exp2(scores[i, j] * scale - mass[j]),
                        0.0,
                    )
                T.copy(scores, weights)
                product(weights, cotangents, dvalues)
                T.fill(slopes, 0)
                product_transposed(values, cotangents, slopes)
                for i, j in d.each(size, size):
                    slopes[i, j] = T.if_then_else(
                        T.And(
                            visible(packed, begin + j, seen + i, query_ids, key_ids, j, i),
                            scores[i, j] < _below_one(mass[j]),
                        ),
                        scores[i, j] * (slopes[i, j] - mean[j]),
                        0.0,
                    )
                T.copy(slopes, weights)
                product(weights, queries, dkeys)
            for i, j in d.each(size, padded):
                dkeys[i, j] = dkeys[i, j] * (scale / LOG2_E)
            T.copy(dkeys, dk[row, seen : seen + size, kv_head, 0:padded])
            T.copy(dvalues, dv[row, seen : seen + size, kv_head, 0:padded])

    return program
