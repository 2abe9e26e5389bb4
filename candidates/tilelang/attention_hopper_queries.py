"""dq for Hopper GPUs, in 16-bit dtypes: in a fixed order, or rounded from sums in any order."""

import math
from typing import Any

import tilelang.language as T

from candidates.tilelang.attention_hopper import ALL, HALF, OPTIONS, ROWS
from candidates.tilelang.attention_hopper_backward import has_slope
from candidates.tilelang.attention_kernels import LOG2_E
from candidates.tilelang.dialect import Dialect


def hopper_backward_queries(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    stages: int = 2,
) -> Any:  # fmt: skip
    """dq [B,T,N,H] without additions in any order: the sum over the key tiles of a query tile."""
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows, columns, f32 = T.GemmWarpPolicy.FullRow, HALF, "float32"

    @T.prim_func
    def program(
        q: T.Tensor((batch, tokens, heads, width), dtype),
        k: T.Tensor((batch, tokens, kv_heads, width), dtype),
        v: T.Tensor((batch, tokens, kv_heads, width), dtype),
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, ROWS), 4), "int32"),
        dout: T.Tensor((batch, tokens, heads, width), dtype),
        lse: T.Tensor((batch, heads, T.ceildiv(tokens, ROWS) * ROWS), f32),
        delta: T.Tensor((batch, heads, T.ceildiv(tokens, ROWS) * ROWS), f32),
        dq: T.Tensor((batch, tokens, heads, width), dtype),
    ):
        with T.Kernel(heads * batch, T.ceildiv(tokens, ROWS), threads=384) as (head_row, reverse):
            queries = T.alloc_shared((ROWS, width), dtype)
            cotangents = T.alloc_shared((ROWS, width), dtype)
            keys = T.alloc_shared((stages, columns, width), dtype)
            values = T.alloc_shared((stages, columns, width), dtype)
            q_full = T.alloc_barrier([32])
            k_full, k_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            v_full, v_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            scores = T.alloc_fragment((ROWS, columns), f32)
            slopes = T.alloc_fragment((ROWS, columns), f32)
            weights = T.alloc_fragment((ROWS, columns), dtype)
            total = T.alloc_fragment((ROWS, width), f32)
            mass, mean = T.alloc_fragment((ROWS,), f32), T.alloc_fragment((ROWS,), f32)
            query_ids = T.alloc_fragment((ROWS,), id_dtype)
            key_ids = T.alloc_fragment((columns,), id_dtype)
            block = T.ceildiv(tokens, ROWS) - 1 - reverse
            head, row = head_row % heads, head_row // heads
            begin = block * ROWS
            low = ranges[row, block, 0] // columns if packed else 0
            full = ranges[row, block, 1] if packed else 0
            num_steps = T.ceildiv(T.min(begin + ROWS, tokens), columns) - low
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(24, 0)
                if thread < 32:
                    T.tma_copy(
                        q[row, begin : begin + ROWS, head, 0:width], queries, barrier=q_full[0]
                    )
                    T.tma_copy(
                        dout[row, begin : begin + ROWS, head, 0:width],
                        cotangents,
                        barrier=q_full[0],
                    )
                    T.barrier_arrive(q_full[0])
                    for step in T.serial(num_steps):
                        seen = (low + step) * columns
                        slot, turn = step % stages, (step // stages) & 1
                        T.barrier_wait(k_free[slot], turn ^ 1)
                        T.tma_copy(
                            k[row, seen : seen + columns, head // groups, 0:width],
                            keys[slot, :, :],
                            barrier=k_full[slot],
                        )
                        T.barrier_arrive(k_full[slot])
                        T.barrier_wait(v_free[slot], turn ^ 1)
                        T.tma_copy(
                            v[row, seen : seen + columns, head // groups, 0:width],
                            values[slot, :, :],
                            barrier=v_full[slot],
                        )
                        T.barrier_arrive(v_full[slot])
            else:
                T.set_max_nreg(240, 1)
                T.fill(total, 0)
                T.copy(lse[row, head, begin : begin + ROWS], mass)
                T.copy(delta[row, head, begin : begin + ROWS], mean)
                if packed:
                    T.copy(documents[row, begin : begin + ROWS], query_ids)
                T.barrier_wait(q_full[0], 0)
                for step in T.serial(num_steps):
                    seen = (low + step) * columns
                    slot, turn = step % stages, (step // stages) & 1
                    T.barrier_wait(k_full[slot], turn)
                    T.wgmma_gemm(
                        queries,
                        keys[slot, :, :],
                        scores,
                        transpose_B=True,
                        policy=all_rows,
                        clear_accum=True,
                    )
                    T.barrier_wait(v_full[slot], turn)
                    T.wgmma_gemm(
                        cotangents,
                        values[slot, :, :],
                        slopes,
                        transpose_B=True,
                        policy=all_rows,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(scores, num_regs=columns // 2)
                    for i, j in T.Parallel(ROWS, columns):
                        scores[i, j] = T.exp2(scores[i, j] * scale - mass[i])
                    hidden = seen + columns > begin or seen < full
                    if hidden:
                        for i, j in T.Parallel(ROWS, columns):
                            scores[i, j] = T.if_then_else(seen + j <= begin + i, scores[i, j], 0.0)
                        if packed:
                            T.copy(documents[row, seen : seen + columns], key_ids)
                            for i, j in T.Parallel(ROWS, columns):
                                scores[i, j] = T.if_then_else(
                                    query_ids[i] == key_ids[j], scores[i, j], 0.0
                                )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(slopes, num_regs=columns // 2)
                    T.warpgroup_fence_operand(total, num_regs=width // 2)
                    T.barrier_arrive(v_free[slot])
                    if step > 0:
                        T.barrier_arrive(k_free[(step - 1) % stages])
                    for i, j in T.Parallel(ROWS, columns):
                        slopes[i, j] = scores[i, j] * (slopes[i, j] - mean[i])
                    if hidden:
                        for i, j in T.Parallel(ROWS, columns):
                            slopes[i, j] = T.if_then_else(
                                has_slope(scores[i, j]), slopes[i, j], 0.0
                            )
                    T.copy(slopes, weights)
                    T.wgmma_gemm(weights, keys[slot, :, :], total, policy=all_rows)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(total, num_regs=width // 2)
                for i, j in T.Parallel(ROWS, width):
                    total[i, j] = total[i, j] * (scale / LOG2_E)
                T.copy(total, queries)
                T.fence_proxy_async()
                T.sync_threads(ALL, 256)
                T.copy(queries, dq[row, begin : begin + ROWS, head, 0:width])

    return program


hopper_backward_queries.options = OPTIONS


def hopper_round_queries(d: Dialect, heads: int, width: int, dtype: str) -> Any:
    """dq [B,T,N,H] = the sums [B,N,T padded,H] float32 / sqrt(H), rounded."""
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")

    @T.prim_func
    def program(
        dq: T.Tensor((batch, tokens, heads, width), dtype),
        dqueries: T.Tensor((batch, heads, T.ceildiv(tokens, ROWS) * ROWS, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(tokens, HALF), heads, batch, threads=256) as (block, head, row):
            tile = T.alloc_fragment((HALF, width), "float32")
            begin = block * HALF
            T.copy(dqueries[row, head, begin : begin + HALF, 0:width], tile)
            for i, j in T.Parallel(HALF, width):
                tile[i, j] = tile[i, j] * (1.0 / math.sqrt(width))
            T.copy(tile, dq[row, begin : begin + HALF, head, 0:width])

    return program
