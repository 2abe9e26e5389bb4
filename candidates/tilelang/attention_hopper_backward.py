"""The attention backward for Hopper GPUs, in 16-bit dtypes: the schedule of attention_hopper.py.

One warp loads, one adds dq to memory, two warpgroups compute. A step takes ROWS keys and HALF
queries: P^T and dS^T stay in registers as the left operands of dv and dk, and dS^T goes to shared
memory once, for dq. Source: Shah et al. 2024 (FlashAttention-3), section 3.
"""

import math
from typing import Any

import tilelang.language as T

from candidates.tilelang.attention_hopper import ALL, OPTIONS, ROWS
from candidates.tilelang.attention_kernels import LOG2_E
from candidates.tilelang.dialect import Dialect


def has_slope(weight: Any) -> Any:
    """Whether a weight 2^(c S - L) is neither zero nor, but for the rounding of c S and L, one.

    Zero times an infinite slope would not be zero; and a weight of one is alone in its row, where
    dout v^T and rowsum(o dout) cancel, although they are summed in different orders.
    """
    return T.And(weight > 0.0, weight < 1.0 - 2.0**-14)


def hopper_backward(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    adds: bool, HALF: int = 64, early: bool = False, buffers: int = 1,
    stages: int = 2,
) -> Any:  # fmt: skip
    """dk and dv [B,T,K,H], summed in registers; with `adds` also dq, added into `dqueries`.

    `dqueries` [B,N,T padded,H] float32 starts as zeros and ends as dq sqrt(H): key tiles add to it
    in any order; without `adds` it is any [B,N,T padded], which nothing reads. `lse` and `delta`
    are [B,N,T padded], finite in the padding. With `early` dk's product is issued before dq's;
    `buffers` tiles of dq may wait for their addition. Neither changes a value of dk or dv.
    """
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows = T.GemmWarpPolicy.FullRow
    split = T.GemmWarpPolicy.FullCol
    f32, columns = "float32", (width,) if adds else ()

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
        dqueries: T.Tensor((batch, heads, T.ceildiv(tokens, ROWS) * ROWS, *columns), f32),
        dk: T.Tensor((batch, tokens, kv_heads, width), dtype),
        dv: T.Tensor((batch, tokens, kv_heads, width), dtype),
    ):
        with T.Kernel(kv_heads * batch, T.ceildiv(tokens, ROWS), threads=384) as (head_row, block):
            keys, values = (
                T.alloc_shared((ROWS, width), dtype),
                T.alloc_shared((ROWS, width), dtype),
            )
            queries = T.alloc_shared((stages, HALF, width), dtype)
            cotangents = T.alloc_shared((stages, HALF, width), dtype)
            mass, mean = T.alloc_shared((stages, HALF), f32), T.alloc_shared((stages, HALF), f32)
            slopes_shared = T.alloc_shared((2, ROWS, HALF), dtype)
            dq_shared = T.alloc_shared((buffers, HALF, width), f32)
            kv_full = T.alloc_barrier([32])
            q_full, q_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            do_full, do_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            dq_full, dq_free = T.alloc_barrier([256] * buffers), T.alloc_barrier([32] * buffers)
            scores = T.alloc_fragment((ROWS, HALF), f32)  # of keys by queries
            slopes = T.alloc_fragment((ROWS, HALF), f32)
            weights = T.alloc_fragment((ROWS, HALF), dtype)
            turned = T.alloc_fragment((ROWS, HALF), dtype)
            dkeys, dvalues = (
                T.alloc_fragment((ROWS, width), f32),
                T.alloc_fragment((ROWS, width), f32),
            )
            part = T.alloc_fragment((HALF, width), f32)
            key_ids = T.alloc_fragment((ROWS,), id_dtype)
            query_ids = T.alloc_fragment((HALF,), id_dtype)
            kv_head, row = head_row % kv_heads, head_row // kv_heads
            seen = block * ROWS
            first = seen // HALF
            num_tiles = T.ceildiv(ranges[row, block, 2] if packed else tokens, HALF) - first
            full = ranges[row, block, 3] if packed else tokens
            num_steps = num_tiles * groups
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(24, 0)
                if thread < 32:
                    T.tma_copy(
                        k[row, seen : seen + ROWS, kv_head, 0:width], keys, barrier=kv_full[0]
                    )
                    T.tma_copy(
                        v[row, seen : seen + ROWS, kv_head, 0:width], values, barrier=kv_full[0]
                    )
                    T.barrier_arrive(kv_full[0])
                    for step in T.serial(num_steps):
                        head = kv_head * groups + step // num_tiles
                        begin = (first + step % num_tiles) * HALF
                        slot, turn = step % stages, (step // stages) & 1
                        T.barrier_wait(q_free[slot], turn ^ 1)
                        T.tma_copy(
                            q[row, begin : begin + HALF, head, 0:width],
                            queries[slot, :, :],
                            barrier=q_full[slot],
                        )
                        T.tma_copy(
                            lse[row, head, begin : begin + HALF],
                            mass[slot, :],
                            barrier=q_full[slot],
                        )
                        T.barrier_arrive(q_full[slot])
                        T.barrier_wait(do_free[slot], turn ^ 1)
                        T.tma_copy(
                            dout[row, begin : begin + HALF, head, 0:width],
                            cotangents[slot, :, :],
                            barrier=do_full[slot],
                        )
                        T.tma_copy(
                            delta[row, head, begin : begin + HALF],
                            mean[slot, :],
                            barrier=do_full[slot],
                        )
                        T.barrier_arrive(do_full[slot])
                elif thread < 64:  # noqa: SIM102
                    if adds:
                        for step in T.serial(num_steps):
                            head = kv_head * groups + step // num_tiles
                            begin = (first + step % num_tiles) * HALF
                            T.barrier_wait(dq_full[step % buffers], (step // buffers) & 1)
                            T.atomic_add(
                                dqueries[row, head, begin : begin + HALF, 0:width],
                                dq_shared[step % buffers, :, :],
                                use_tma=True,
                            )
                            T.barrier_arrive(dq_free[step % buffers])
            else:
                T.set_max_nreg(240, 1)
                T.fill(dkeys, 0)
                T.fill(dvalues, 0)
                if packed:
                    T.copy(documents[row, seen : seen + ROWS], key_ids)
                T.barrier_wait(kv_full[0], 0)
                for step in T.serial(num_steps):
                    begin = (first + step % num_tiles) * HALF
                    slot, turn = step % stages, (step // stages) & 1
                    T.barrier_wait(q_full[slot], turn)
                    T.wgmma_gemm(
                        keys,
                        queries[slot, :, :],
                        scores,
                        transpose_B=True,
                        policy=all_rows,
                        clear_accum=True,
                    )
                    T.barrier_wait(do_full[slot], turn)
                    T.wgmma_gemm(
                        values,
                        cotangents[slot, :, :],
                        slopes,
                        transpose_B=True,
                        policy=all_rows,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(scores, num_regs=HALF // 2)
                    for i, j in T.Parallel(ROWS, HALF):
                        scores[i, j] = T.exp2(scores[i, j] * scale - mass[slot, j])
                    hidden = begin < seen + ROWS or begin + HALF > full
                    if hidden:
                        for i, j in T.Parallel(ROWS, HALF):
                            scores[i, j] = T.if_then_else(seen + i <= begin + j, scores[i, j], 0.0)
                        if packed:
                            T.copy(documents[row, begin : begin + HALF], query_ids)
                            for i, j in T.Parallel(ROWS, HALF):
                                scores[i, j] = T.if_then_else(
                                    query_ids[j] == key_ids[i], scores[i, j], 0.0
                                )
                    T.copy(scores, weights)
                    T.wgmma_gemm(weights, cotangents[slot, :, :], dvalues, policy=all_rows)
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(slopes, num_regs=HALF // 2)
                    for i, j in T.Parallel(ROWS, HALF):
                        slopes[i, j] = scores[i, j] * (slopes[i, j] - mean[slot, j])
                    if hidden:
                        for i, j in T.Parallel(ROWS, HALF):
                            slopes[i, j] = T.if_then_else(
                                has_slope(scores[i, j]), slopes[i, j], 0.0
                            )
                    T.copy(slopes, turned)
                    if adds and early:
                        T.wgmma_gemm(turned, queries[slot, :, :], dkeys, policy=all_rows)
                    if adds:
                        T.copy(turned, slopes_shared[step & 1, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(ALL, 256)
                        T.wgmma_gemm(
                            slopes_shared[step & 1, :, :],
                            keys,
                            part,
                            transpose_A=True,
                            policy=split,
                            clear_accum=True,
                        )
                        if early:
                            T.wait_wgmma(0)
                        else:
                            T.wgmma_gemm(turned, queries[slot, :, :], dkeys, policy=all_rows)
                            T.wait_wgmma(1)
                        T.warpgroup_fence_operand(part, num_regs=HALF * width // 256)
                        T.barrier_arrive(do_free[slot])
                        T.barrier_wait(dq_free[step % buffers], ((step // buffers) & 1) ^ 1)
                        T.copy(part, dq_shared[step % buffers, :, :])
                        T.fence_proxy_async()
                        T.barrier_arrive(dq_full[step % buffers])
                    else:
                        T.wgmma_gemm(turned, queries[slot, :, :], dkeys, policy=all_rows)
                        T.wait_wgmma(1)
                        T.barrier_arrive(do_free[slot])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(dkeys, num_regs=width // 2)
                    T.warpgroup_fence_operand(dvalues, num_regs=width // 2)
                    T.barrier_arrive(q_free[slot])
                for i, j in T.Parallel(ROWS, width):
                    dkeys[i, j] = dkeys[i, j] * (scale / LOG2_E)
                T.sync_threads(ALL, 256)  # the last product that reads the keys is done
                T.copy(dkeys, keys)
                T.copy(dvalues, values)
                T.fence_proxy_async()
                T.sync_threads(ALL, 256)
                T.copy(keys, dk[row, seen : seen + ROWS, kv_head, 0:width])
                T.copy(values, dv[row, seen : seen + ROWS, kv_head, 0:width])

    return program


hopper_backward.options = OPTIONS
