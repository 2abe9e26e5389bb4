"""A faster schedule of the attention forward and backward for Hopper GPUs, in 16-bit dtypes."""

import math
from typing import Any

import tilelang
import tilelang.language as T

from candidates.tilelang.attention_kernels import LOG2_E, LOWEST, PLAIN
from candidates.tilelang.dialect import Dialect

HOPPER_WIDTHS = (64, 128)
ROWS = 128  # tokens of a tile: 64 for each of the two warpgroups that compute
HALF = 64  # queries of a step of the backward
# Named barriers: of the 256 threads that compute; of each of their warpgroups (and the next number).
ALL, TURN, STORE = 9, 10, 12
OPTIONS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    # The text states each barrier: those that TileLang infers would stop both warpgroups each step.
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def hopper_forward(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    columns: int = 128, stages: int = 2, turns: bool = False,
) -> Any:  # fmt: skip
    """o and L as attention_forward; one warpgroup loads, two compute.

    The ranges are those of document_ranges with tiles of ROWS tokens.
    """
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows = T.GemmWarpPolicy.FullRow
    f32 = "float32"

    @T.macro
    def hide(
        scores: Any, query_ids: Any, key_ids: Any, documents: Any, row: Any, begin: Any, seen: Any,
        full: Any,
    ):
        """Sets the scores of what a query may not see to minus infinity."""
        if seen + columns > begin or seen < full:
            for i, j in T.Parallel(ROWS, columns):
                visible = seen + j <= begin + i
                scores[i, j] = T.if_then_else(visible, scores[i, j], -T.infinity(f32))
            if packed:
                T.copy(documents[row, seen : seen + columns], key_ids)
                for i, j in T.Parallel(ROWS, columns):
                    scores[i, j] = T.if_then_else(
                        query_ids[i] == key_ids[j], scores[i, j], -T.infinity(f32)
                    )

    @T.macro
    def soften(scores: Any, highest: Any, before: Any, fade: Any, part: Any, mass: Any):
        """Turns scores into weights, and brings the maximum and the sum of each row up to date."""
        T.copy(highest, before)
        T.reduce_max(scores, highest, dim=1, clear=False)
        for i in T.Parallel(ROWS):
            fade[i] = T.exp2((before[i] - highest[i]) * scale)
        for i, j in T.Parallel(ROWS, columns):
            scores[i, j] = T.exp2(scores[i, j] * scale - highest[i] * scale)
        T.reduce_sum(scores, part, dim=1)
        for i in T.Parallel(ROWS):
            mass[i] = mass[i] * fade[i] + part[i]

    @T.prim_func
    def program(
        q: T.Tensor((batch, tokens, heads, width), dtype),
        k: T.Tensor((batch, tokens, kv_heads, width), dtype),
        v: T.Tensor((batch, tokens, kv_heads, width), dtype),
        documents: T.Tensor((batch, tokens), id_dtype),
        ranges: T.Tensor((batch, T.ceildiv(tokens, ROWS), 4), "int32"),
        o: T.Tensor((batch, tokens, heads, width), dtype),
        lse: T.Tensor((batch, heads, T.ceildiv(tokens, ROWS) * ROWS), f32),
        num_workers: T.int32,
    ):
        with T.Kernel(num_workers, threads=384) as worker:
            queries = T.alloc_shared((ROWS, width), dtype)
            keys = T.alloc_shared((stages, columns, width), dtype)
            values = T.alloc_shared((stages, columns, width), dtype)
            output = T.alloc_shared((2, HALF, width), dtype)
            q_full, q_free = T.alloc_barrier([32]), T.alloc_barrier([256])
            k_full, k_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            v_full, v_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            scores = T.alloc_fragment((ROWS, columns), f32)
            weights = T.alloc_fragment((ROWS, columns), dtype)
            total = T.alloc_fragment((ROWS, width), f32)
            highest, before = T.alloc_fragment((ROWS,), f32), T.alloc_fragment((ROWS,), f32)
            fade, part = T.alloc_fragment((ROWS,), f32), T.alloc_fragment((ROWS,), f32)
            mass = T.alloc_fragment((ROWS,), f32)
            query_ids = T.alloc_fragment((ROWS,), id_dtype)
            key_ids = T.alloc_fragment((columns,), id_dtype)
            num_blocks, lanes = T.ceildiv(tokens, ROWS), heads * batch
            num_rounds = T.ceildiv(num_blocks * lanes, num_workers)
            thread = T.get_thread_binding()
            count = T.alloc_var("int32", init=0)  # steps of this worker so far
            # Variables, not names of expressions: TileLang would repeat those at every use.
            block, head, row = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            begin, low, full = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            task, num_steps, seen = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            slot, turn = T.alloc_var("int32"), T.alloc_var("int32")
            old, old_turn = T.alloc_var("int32"), T.alloc_var("int32")
            if thread < 128:
                T.set_max_nreg(24, 0)
                if thread < 32:
                    for lap in T.serial(num_rounds):
                        task = lap * num_workers + T.if_then_else(
                            lap % 2 == 0, worker, num_workers - 1 - worker
                        )
                        if task < num_blocks * lanes:
                            block = num_blocks - 1 - T.truncdiv(task, lanes)
                            row = T.truncdiv(T.truncmod(task, lanes), heads)
                            head = T.truncmod(T.truncmod(task, lanes), heads)
                            begin = block * ROWS
                            low = T.truncdiv(ranges[row, block, 0], columns) if packed else 0
                            num_steps = T.truncdiv(T.min(begin + ROWS, tokens) + columns - 1, columns) - low
                            T.barrier_wait(q_free[0], (lap & 1) ^ 1)
                            T.tma_copy(
                                q[row, begin : begin + ROWS, head, 0:width], queries,
                                barrier=q_full[0],
                            )
                            T.barrier_arrive(q_full[0])
                            for step in T.serial(num_steps):
                                seen = (low + num_steps - 1 - step) * columns
                                slot = T.truncmod(count, stages)
                                turn = T.truncdiv(count, stages) & 1
                                T.barrier_wait(k_free[slot], turn ^ 1)
                                T.tma_copy(
                                    k[row, seen : seen + columns, head // groups, 0:width],
                                    keys[slot, :, :], barrier=k_full[slot],
                                )
                                T.barrier_arrive(k_full[slot])
                                T.barrier_wait(v_free[slot], turn ^ 1)
                                T.tma_copy(
                                    v[row, seen : seen + columns, head // groups, 0:width],
                                    values[slot, :, :], barrier=v_full[slot],
                                )
                                T.barrier_arrive(v_full[slot])
                                count = count + 1
            else:
                T.set_max_nreg(240, 1)
                group = (thread >> 7) - 1
                if turns:
                    if thread >= 256:
                        T.named_barrier_arrive(TURN, 256)
                for lap in T.serial(num_rounds):
                    task = lap * num_workers + T.if_then_else(
                        lap % 2 == 0, worker, num_workers - 1 - worker
                    )
                    if task < num_blocks * lanes:
                        block = num_blocks - 1 - T.truncdiv(task, lanes)
                        row = T.truncdiv(T.truncmod(task, lanes), heads)
                        head = T.truncmod(T.truncmod(task, lanes), heads)
                        begin = block * ROWS
                        low = T.truncdiv(ranges[row, block, 0], columns) if packed else 0
                        full = ranges[row, block, 1] if packed else 0
                        num_steps = T.truncdiv(T.min(begin + ROWS, tokens) + columns - 1, columns) - low
                        seen = (low + num_steps - 1) * columns
                        slot = T.truncmod(count, stages)
                        turn = T.truncdiv(count, stages) & 1
                        T.fill(total, 0)
                        T.fill(mass, 0)
                        T.fill(highest, LOWEST)
                        if packed:
                            T.copy(documents[row, begin : begin + ROWS], query_ids)
                        T.barrier_wait(q_full[0], lap & 1)
                        T.barrier_wait(k_full[slot], turn)
                        T.wgmma_gemm(
                            queries, keys[slot, :, :], scores, transpose_B=True,
                            policy=all_rows, clear_accum=True,
                        )
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(scores, num_regs=columns // 2)
                        T.barrier_arrive(k_free[slot])
                        hide(scores, query_ids, key_ids, documents, row, begin, seen, full)
                        soften(scores, highest, before, fade, part, mass)
                        T.copy(scores, weights)
                        for step in T.serial(1, num_steps):
                            old = slot
                            old_turn = turn
                            count = count + 1
                            slot = T.truncmod(count, stages)
                            turn = T.truncdiv(count, stages) & 1
                            T.barrier_wait(k_full[slot], turn)
                            if turns:
                                T.sync_threads(TURN + group, 256)
                            T.wgmma_gemm(
                                queries, keys[slot, :, :], scores, transpose_B=True,
                                policy=all_rows, clear_accum=True,
                            )
                            T.barrier_wait(v_full[old], old_turn)
                            T.wgmma_gemm(weights, values[old, :, :], total, policy=all_rows)
                            if turns:
                                T.named_barrier_arrive(TURN + 1 - group, 256)
                            T.wait_wgmma(1)
                            T.warpgroup_fence_operand(scores, num_regs=columns // 2)
                            T.barrier_arrive(k_free[slot])
                            seen = seen - columns
                            hide(scores, query_ids, key_ids, documents, row, begin, seen, full)
                            soften(scores, highest, before, fade, part, mass)
                            T.wait_wgmma(0)
                            T.warpgroup_fence_operand(total, num_regs=width // 2)
                            T.barrier_arrive(v_free[old])
                            T.copy(scores, weights)
                            for i, j in T.Parallel(ROWS, width):
                                total[i, j] = total[i, j] * fade[i]
                        T.barrier_arrive(q_free[0])
                        T.barrier_wait(v_full[slot], turn)
                        T.wgmma_gemm(
                            weights, values[slot, :, :], total, policy=all_rows
                        )
                        for i in T.Parallel(ROWS):
                            fade[i] = 1.0 / mass[i]
                            mass[i] = T.if_then_else(
                                begin + i < tokens, T.log2(mass[i]) + highest[i] * scale, 0.0
                            )
                        T.copy(mass, lse[row, head, begin : begin + ROWS], annotations=PLAIN)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(total, num_regs=width // 2)
                        T.barrier_arrive(v_free[slot])
                        count = count + 1
                        for i, j in T.Parallel(ROWS, width):
                            total[i, j] = total[i, j] * fade[i]
                        T.tma_store_wait(0)  # of the tile before, by the thread that stored it
                        T.sync_threads(STORE + group, 128)
                        for i, j in T.Parallel(ROWS, width):
                            output[i // HALF, i % HALF, j] = total[i, j]
                        T.fence_proxy_async()
                        T.sync_threads(STORE + group, 128)
                        if thread < 256:
                            T.tma_copy(
                                output[0, :, :], o[row, begin : begin + HALF, head, 0:width]
                            )
                        else:
                            T.tma_copy(
                                output[1, :, :],
                                o[row, begin + HALF : begin + ROWS, head, 0:width],
                            )
                T.tma_store_wait(0)

    return program


hopper_forward.options = OPTIONS


@T.macro
def select(weights: Any, slopes: Any):
    """Sets the slopes to zero where the weight is zero (never zero times infinity) or one.

    A weight of one but for rounding is alone in its row: dout v^T and rowsum(o dout) cancel.
    """
    for i, j in T.Parallel(weights.shape[0], weights.shape[1]):
        slopes[i, j] = T.if_then_else(
            T.And(weights[i, j] > 0.0, weights[i, j] < 1.0 - 2.0**-12), slopes[i, j], 0.0
        )


def hopper_backward(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    adds: bool, stages: int = 2,
) -> Any:  # fmt: skip
    """dk and dv [B,T,K,H], summed in registers; with `adds` also dq, added into `dqueries`.

    `dqueries` [B,N,T padded,H] float32 starts as zeros and ends as dq sqrt(H): key tiles add to it in
    any order; without `adds` it is any [B,N,T padded], which nothing reads. `lse` and `delta` are
    [B,N,T padded], finite in the padding.
    """
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows, all_columns = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol
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
            keys, values = T.alloc_shared((ROWS, width), dtype), T.alloc_shared((ROWS, width), dtype)
            queries = T.alloc_shared((stages, HALF, width), dtype)
            cotangents = T.alloc_shared((stages, HALF, width), dtype)
            mass, mean = T.alloc_shared((stages, HALF), f32), T.alloc_shared((stages, HALF), f32)
            slopes_shared = T.alloc_shared((2, ROWS, HALF), dtype)
            dq_shared = T.alloc_shared((HALF, width), f32)
            kv_full = T.alloc_barrier([32])
            q_full, q_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            do_full, do_free = T.alloc_barrier([32] * stages), T.alloc_barrier([256] * stages)
            dq_full, dq_free = T.alloc_barrier([256]), T.alloc_barrier([32])
            scores = T.alloc_fragment((ROWS, HALF), f32)  # of keys by queries
            slopes = T.alloc_fragment((ROWS, HALF), f32)
            weights = T.alloc_fragment((ROWS, HALF), dtype)
            turned = T.alloc_fragment((ROWS, HALF), dtype)
            dkeys, dvalues = T.alloc_fragment((ROWS, width), f32), T.alloc_fragment((ROWS, width), f32)
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
                    T.tma_copy(k[row, seen : seen + ROWS, kv_head, 0:width], keys, barrier=kv_full[0])
                    T.tma_copy(v[row, seen : seen + ROWS, kv_head, 0:width], values, barrier=kv_full[0])
                    T.barrier_arrive(kv_full[0])
                    for step in T.serial(num_steps):
                        head = kv_head * groups + step // num_tiles
                        begin = (first + step % num_tiles) * HALF
                        slot, turn = step % stages, (step // stages) & 1
                        T.barrier_wait(q_free[slot], turn ^ 1)
                        T.tma_copy(
                            q[row, begin : begin + HALF, head, 0:width], queries[slot, :, :],
                            barrier=q_full[slot],
                        )
                        T.tma_copy(
                            lse[row, head, begin : begin + HALF], mass[slot, :],
                            barrier=q_full[slot],
                        )
                        T.barrier_arrive(q_full[slot])
                        T.barrier_wait(do_free[slot], turn ^ 1)
                        T.tma_copy(
                            dout[row, begin : begin + HALF, head, 0:width], cotangents[slot, :, :],
                            barrier=do_full[slot],
                        )
                        T.tma_copy(
                            delta[row, head, begin : begin + HALF], mean[slot, :],
                            barrier=do_full[slot],
                        )
                        T.barrier_arrive(do_full[slot])
                elif thread < 64:
                    if adds:
                        for step in T.serial(num_steps):
                            head = kv_head * groups + step // num_tiles
                            begin = (first + step % num_tiles) * HALF
                            T.barrier_wait(dq_full[0], step & 1)
                            T.atomic_add(
                                dqueries[row, head, begin : begin + HALF, 0:width], dq_shared,
                                use_tma=True,
                            )
                            T.barrier_arrive(dq_free[0])
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
                        keys, queries[slot, :, :], scores, transpose_B=True, policy=all_rows,
                        clear_accum=True,
                    )
                    T.barrier_wait(do_full[slot], turn)
                    T.wgmma_gemm(
                        values, cotangents[slot, :, :], slopes, transpose_B=True, policy=all_rows,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(scores, num_regs=HALF // 2)
                    for i, j in T.Parallel(ROWS, HALF):
                        scores[i, j] = T.exp2(scores[i, j] * scale - mass[slot, j])
                    hidden = begin < seen + ROWS or begin + HALF > full
                    if hidden:
                        for i, j in T.Parallel(ROWS, HALF):
                            scores[i, j] = T.if_then_else(
                                seen + i <= begin + j, scores[i, j], 0.0
                            )
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
                        select(scores, slopes)
                    T.copy(slopes, turned)
                    if adds:
                        T.copy(turned, slopes_shared[step & 1, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(ALL, 256)
                        T.wgmma_gemm(
                            slopes_shared[step & 1, :, :], keys, part, transpose_A=True, policy=all_columns,
                            clear_accum=True,
                        )
                        T.wgmma_gemm(turned, queries[slot, :, :], dkeys, policy=all_rows)
                        T.wait_wgmma(1)
                        T.warpgroup_fence_operand(part, num_regs=width // 4)
                        T.barrier_arrive(do_free[slot])
                        T.barrier_wait(dq_free[0], (step & 1) ^ 1)
                        T.copy(part, dq_shared)
                        T.fence_proxy_async()
                        T.barrier_arrive(dq_full[0])
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


def hopper_backward_queries(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    stages: int = 2,
) -> Any:  # fmt: skip
    """dq [B,T,N,H] without additions in any order: the sum over the key tiles of a query tile."""
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows, columns, f32 = T.GemmWarpPolicy.FullRow, 64, "float32"

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
                        dout[row, begin : begin + ROWS, head, 0:width], cotangents,
                        barrier=q_full[0],
                    )
                    T.barrier_arrive(q_full[0])
                    for step in T.serial(num_steps):
                        seen = (low + step) * columns
                        slot, turn = step % stages, (step // stages) & 1
                        T.barrier_wait(k_free[slot], turn ^ 1)
                        T.tma_copy(
                            k[row, seen : seen + columns, head // groups, 0:width],
                            keys[slot, :, :], barrier=k_full[slot],
                        )
                        T.barrier_arrive(k_full[slot])
                        T.barrier_wait(v_free[slot], turn ^ 1)
                        T.tma_copy(
                            v[row, seen : seen + columns, head // groups, 0:width],
                            values[slot, :, :], barrier=v_full[slot],
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
                        queries, keys[slot, :, :], scores, transpose_B=True, policy=all_rows,
                        clear_accum=True,
                    )
                    T.barrier_wait(v_full[slot], turn)
                    T.wgmma_gemm(
                        cotangents, values[slot, :, :], slopes, transpose_B=True, policy=all_rows,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(scores, num_regs=columns // 2)
                    for i, j in T.Parallel(ROWS, columns):
                        scores[i, j] = T.exp2(scores[i, j] * scale - mass[i])
                    hidden = seen + columns > begin or seen < full
                    if hidden:
                        for i, j in T.Parallel(ROWS, columns):
                            scores[i, j] = T.if_then_else(
                                seen + j <= begin + i, scores[i, j], 0.0
                            )
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
                        select(scores, slopes)
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
