"""The TileLang programs of causal attention inside documents, the same text for the CPU and CUDA.

With c = log2(e) / sqrt(H), the forward walks over the key tiles of a query tile and keeps the running
maximum and sum of each row (online softmax): P = 2^(c S - L), L = c max S + log2 sum. A masked
weight is selected to zero, never multiplied, so that nothing a query may not see has any influence
on it. The backward computes P again from L, with delta = rowsum(o dout): dS = P (dout v^T - delta),
dv = P^T dout, dk = dS^T q / sqrt(H), dq = dS k / sqrt(H). One program sums dk and dv over the query
tiles and the heads of a group, another dq over the key tiles: no atomics, the same bits every time.
Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2.
"""

import math
from typing import Any

import tilelang.language as T

from candidates.tilelang.dialect import Dialect

LOWEST = -2.0e38  # of a maximum over nothing: finite, so that 2^(LOWEST - LOWEST) is 1, not NaN
# Rows of ids and of log-sum-exps start anywhere; bulk copies (TMA) need a stride of 16 bytes.
PLAIN = {"disable_tma": True}
LOG2_E = 1.0 / math.log(2.0)


def tile(d: Dialect, width: int, dtype: str) -> tuple[int, int]:
    """Tokens of a tile, of queries as of keys, and the width of a head padded for the machine."""
    if not d.on_gpu:
        return 16, width
    padded = -(-width // 16) * 16
    return 64 if dtype != "float32" and padded <= 128 else 32, padded


def document_ranges(d: Dialect, size: int, id_dtype: str) -> Any:
    """What a tile of `size` tokens may see and be seen by: [B, ceil(T / size), 4] int32.

    With lo and hi the smallest and largest id in the tile: 0: the first token whose id lies in
    [lo, hi]. 1: the token from which on, up to the tile, all ids are the tile's only one (the tile's
    own first token if it holds several). 2: the last token whose id lies in [lo, hi], plus 1. 3: the
    token up to which, from the tile on, all ids are the tile's only one (the tile's end if it holds
    several). A query tile needs keys from 0 on, and no mask from 1 on; a key tile is needed by
    queries before 2, and without a mask before 3. Right for ids in any order.
    """
    step = 1024 if d.on_gpu else 16
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, size), 4), "int32"),
    ):
        with d.grid(T.ceildiv(tokens, size), batch) as (block, row):
            begin, end = block * size, T.min(block * size + size, tokens)
            own = d.registers((1, size), id_dtype)
            low, high = d.registers((1,), id_dtype), d.registers((1,), id_dtype)
            ids = d.registers((1, step), id_dtype)
            first, last = d.registers((1, step), "int32"), d.registers((1, step), "int32")
            differs, differs_after = (
                d.registers((1, step), "int32"),
                d.registers((1, step), "int32"),
            )
            low_bound, high_bound = d.registers((1,), "int32"), d.registers((1,), "int32")
            low_full, high_full = d.registers((1,), "int32"), d.registers((1,), "int32")
            for z, i in d.each(1, size):
                own[z, i] = documents[row, T.min(begin + i, tokens - 1)]
            T.reduce_min(own, low, dim=1)
            T.reduce_max(own, high, dim=1)
            for z, i in d.each(1, step):
                first[z, i] = begin
                last[z, i] = end
                differs[z, i] = 0
                differs_after[z, i] = tokens
            for chunk in T.serial(T.ceildiv(tokens, step)):
                for z, i in d.each(1, step):
                    ids[z, i] = documents[row, T.min(chunk * step + i, tokens - 1)]
                for z, i in d.each(1, step):
                    token = T.min(chunk * step + i, tokens - 1)
                    if ids[z, i] >= low[z] and ids[z, i] <= high[z]:
                        first[z, i] = T.min(first[z, i], token)
                        last[z, i] = T.max(last[z, i], token + 1)
                    if ids[z, i] != low[z] or ids[z, i] != high[z]:
                        if token < begin:
                            differs[z, i] = T.max(differs[z, i], token + 1)
                        if token >= end:
                            differs_after[z, i] = T.min(differs_after[z, i], token)
            T.reduce_min(first, low_bound, dim=1)
            T.reduce_max(last, high_bound, dim=1)
            T.reduce_max(differs, low_full, dim=1)
            T.reduce_min(differs_after, high_full, dim=1)
            for z in d.each(1):
                ranges[row, block, 0] = low_bound[z]
                ranges[row, block, 1] = T.if_then_else(low[z] == high[z], low_full[z], begin)
                ranges[row, block, 2] = high_bound[z]
                ranges[row, block, 3] = T.if_then_else(low[z] == high[z], high_full[z], end)

    return program


def _visible(
    packed: bool, query: Any, key: Any, query_ids: Any, key_ids: Any, i: Any, j: Any
) -> Any:
    """Whether the token `query`, row i of its tile, sees the token `key`, row j of its tile."""
    earlier = key <= query
    return T.And(earlier, query_ids[i] == key_ids[j]) if packed else earlier


def _stages(width: int, dtype: str, stages: int) -> int:
    """Stages of a loop's loads: none where a row of a head is no bulk copy's multiple of 16 bytes."""
    return 0 if width * (4 if dtype == "float32" else 2) % 16 else stages


def _products(d: Dialect, dtype: str) -> tuple[Any, Any]:
    """Two macros, c += a b and c += a b^T, summed in float32, and exact products of float32.

    The tensor cores would round float32 to tf32, so on a GPU float32 is multiplied by the threads.
    """
    if dtype != "float32" or not d.on_gpu:
        rows = T.GemmWarpPolicy.FullRow

        @T.macro
        def product(a: Any, b: Any, c: Any):
            T.gemm(a, b, c, policy=rows)

        @T.macro
        def product_transposed(a: Any, b: Any, c: Any):
            T.gemm(a, b, c, transpose_B=True, policy=rows)

        return product, product_transposed

    @T.macro
    def sums(a: Any, b: Any, c: Any):
        for inner in T.serial(a.shape[1]):
            for i, j in d.each(c.shape[0], c.shape[1]):
                c[i, j] = c[i, j] + a[i, inner] * b[inner, j]

    @T.macro
    def sums_transposed(a: Any, b: Any, c: Any):
        for inner in T.serial(a.shape[1]):
            for i, j in d.each(c.shape[0], c.shape[1]):
                c[i, j] = c[i, j] + a[i, inner] * b[j, inner]

    return sums, sums_transposed


def _below_one(mass: Any) -> Any:
    """The least weight 2^(c S - L) that is one but for the rounding of L.

    Such a weight is alone in its row, so its slope is zero: exactly, although dout v^T and
    rowsum(o dout) are summed in different orders.
    """
    return 1.0 - 2.0**-23 * (2.0 + T.max(mass, -mass))


def _operand(d: Dialect, shape: tuple[int, int], dtype: str) -> Any:
    """A computed tile that is a left operand: in registers, except where every thread reads it."""
    return d.shared(shape, dtype) if dtype == "float32" else d.registers(shape, dtype)


def attention_forward(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    stages: int = 2,
) -> Any:  # fmt: skip
    """o [B,T,N,H] and L [B,N,T padded to tiles] of q [B,T,N,H], k and v [B,T,K,H], K = N / groups.

    Without `packed` a row is one document, and nothing reads `documents` [B,T] and `ranges`.
    """
    size, padded = tile(d, width, dtype)
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    product, product_transposed = _products(d, dtype)
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        q: T.Tensor((batch, tokens, heads, width), dtype),
        k: T.Tensor((batch, tokens, kv_heads, width), dtype),
        v: T.Tensor((batch, tokens, kv_heads, width), dtype),
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, size), 4), "int32"),
        o: T.Tensor((batch, tokens, heads, width), dtype),
        lse: T.Tensor((batch, heads, T.ceildiv(tokens, size) * size), "float32"),
    ):
        with d.grid(T.ceildiv(tokens, size), heads, batch) as (block, head, row):
            queries = d.shared((size, padded), dtype)
            keys, values = d.shared((size, padded), dtype), d.shared((size, padded), dtype)
            query_ids, key_ids = d.registers((size,), id_dtype), d.shared((size,), id_dtype)
            scores = d.registers((size, size), "float32")
            weights = _operand(d, (size, size), dtype)
            total = d.registers((size, padded), "float32")
            highest, before = d.registers((size,), "float32"), d.registers((size,), "float32")
            fade, part = d.registers((size,), "float32"), d.registers((size,), "float32")
            mass = d.registers((size,), "float32")
            begin = block * size
            T.copy(q[row, begin : begin + size, head, 0:padded], queries)
            T.fill(total, 0)
            T.fill(mass, 0)
            T.fill(highest, LOWEST)
            if packed:
                T.copy(documents[row, begin : begin + size], query_ids, annotations=PLAIN)
            start = T.floordiv(ranges[row, block, 0], size) if packed else 0
            for step in d.pipelined(start, block + 1, num_stages=_stages(width, dtype, stages)):
                seen = step * size
                T.copy(k[row, seen : seen + size, head // groups, 0:padded], keys)
                T.copy(v[row, seen : seen + size, head // groups, 0:padded], values)
                if packed:
                    T.copy(documents[row, seen : seen + size], key_ids, annotations=PLAIN)
                T.fill(scores, 0)
                product_transposed(queries, keys, scores)
                for i, j in d.each(size, size):
                    scores[i, j] = T.if_then_else(
                        _visible(packed, begin + i, seen + j, query_ids, key_ids, i, j),
                        scores[i, j],
                        -T.infinity("float32"),
                    )
                T.copy(highest, before)
                T.reduce_max(scores, highest, dim=1, clear=False)
                for i in d.each(size):
                    fade[i] = T.exp2((before[i] - highest[i]) * scale)
                for i, j in d.each(size, size):
                    scores[i, j] = T.exp2((scores[i, j] - highest[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in d.each(size):
                    mass[i] = mass[i] * fade[i] + part[i]
                for i, j in d.each(size, padded):
                    total[i, j] = total[i, j] * fade[i]
                T.copy(scores, weights)
                product(weights, values, total)
            for i, j in d.each(size, padded):
                total[i, j] = total[i, j] / mass[i]
            T.copy(total, o[row, begin : begin + size, head, 0:padded])
            for i in d.each(size):  # finite in the padding, where the backward reads it too
                mass[i] = T.if_then_else(
                    begin + i < tokens, T.log2(mass[i]) + highest[i] * scale, 0.0
                )
            T.copy(mass, lse[row, head, begin : begin + size], annotations=PLAIN)

    return program


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
    product, product_transposed = _products(d, dtype)
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
            weights = _operand(d, (size, size), dtype)
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
            for step in d.pipelined(start, block + 1, num_stages=_stages(width, dtype, stages)):
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
                            _visible(packed, begin + i, seen + j, query_ids, key_ids, i, j),
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
    product, product_transposed = _products(d, dtype)
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
            weights = _operand(d, (size, size), dtype)
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
            for step in d.pipelined(0, (stop - block) * groups, num_stages=_stages(width, dtype, stages)):
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
                        _visible(packed, begin + j, seen + i, query_ids, key_ids, j, i),
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
                            _visible(packed, begin + j, seen + i, query_ids, key_ids, j, i),
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
