"""The TileLang programs of causal attention inside documents, the same text for the CPU and CUDA.

With c = log2(e) / sqrt(H), the forward walks over the key tiles of a query tile and keeps the
running maximum and sum of each row (online softmax): P = 2^(c S - L), L = c max S + log2 sum. A
masked weight is selected to zero, never multiplied: nothing a query may not see has an influence.
Source: Dao 2023 (FlashAttention-2), algorithm 1.
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
    return 32 if dtype == "float32" else 64, padded


def document_ranges(d: Dialect, size: int, id_dtype: str) -> Any:
    """What a tile of `size` tokens may see and be seen by: [B, ceil(T / size), 4] int32.

    With lo and hi the smallest and largest id in the tile: 0: the first token whose id lies in
    [lo, hi]. 1: the token from which on, up to the tile, all ids are the tile's only one (the
    tile's own first token if it holds several). 2: the last token whose id lies in [lo, hi], plus
    1. 3: the token up to which, from the tile on, all ids are the tile's only one (the tile's end
    if it holds several). A query tile needs keys from 0 on, and no mask from 1 on; a key tile is
    needed by queries before 2, and without a mask before 3. Right for ids in any order.
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


def visible(
    packed: bool, query: Any, key: Any, query_ids: Any, key_ids: Any, i: Any, j: Any
) -> Any:
    """Whether the token `query`, row i of its tile, sees the token `key`, row j of its tile."""
    earlier = key <= query
    return T.And(earlier, query_ids[i] == key_ids[j]) if packed else earlier


def loop_stages(width: int, dtype: str, stages: int) -> int:
    """Stages of a loop's loads: none if a head's row, not of 16 bytes, cannot be a bulk copy."""
    return 0 if width * (4 if dtype == "float32" else 2) % 16 else stages


def products(d: Dialect, dtype: str) -> tuple[Any, Any]:
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


def operand(d: Dialect, shape: tuple[int, int], dtype: str) -> Any:
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
    product, product_transposed = products(d, dtype)
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
            weights = operand(d, (size, size), dtype)
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
            for step in d.pipelined(start, block + 1, num_stages=loop_stages(width, dtype, stages)):
                seen = step * size
                T.copy(k[row, seen : seen + size, head // groups, 0:padded], keys)
                T.copy(v[row, seen : seen + size, head // groups, 0:padded], values)
                if packed:
                    T.copy(documents[row, seen : seen + size], key_ids, annotations=PLAIN)
                T.fill(scores, 0)
                product_transposed(queries, keys, scores)
                for i, j in d.each(size, size):
                    scores[i, j] = T.if_then_else(
                        visible(packed, begin + i, seen + j, query_ids, key_ids, i, j),
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
