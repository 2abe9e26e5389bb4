"""The attention forward for Hopper GPUs, in 16-bit dtypes: the schedule that is fast there.

Loads are bulk copies (TMA) that a warp of their own issues; every wait is written down here, since
TileLang neither pipelines these loops nor infers their barriers.
"""

import math
from typing import Any

import tilelang
import tilelang.language as T

from candidates.tilelang.attention_kernels import LOG2_E, LOWEST, PLAIN
from candidates.tilelang.dialect import Dialect

HOPPER_WIDTHS = (64, 128)
ROWS = 128  # tokens of a tile: 64 for each of the two warpgroups that compute
HALF = 64  # tokens of one of them
# Named barriers: of the 256 threads that compute; and two pairs, one for each of their warpgroups.
ALL, TURN, STORE = 9, 10, 12
OPTIONS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    # The text states each barrier: those that TileLang infers would stop both warpgroups each step.
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def hopper_forward(
    d: Dialect, heads: int, groups: int, width: int, dtype: str, packed: bool, id_dtype: str,
    columns: int = 128, stages: int = 2,
) -> Any:  # fmt: skip
    """o and L as attention_forward, with tiles of ROWS tokens; one warp loads, two groups compute.

    Each of `num_workers` blocks takes every num_workers-th task, a query tile of a head, the
    longest first. The scores of the next keys are computed while the weights of these meet their
    values. The warpgroups may issue their products in turn, so that the softmax of one falls into
    the products of the other. Source: Shah et al. 2024 (FlashAttention-3), section 3.
    """
    turns = width == 64  # on an H200 8 % faster than without at 64, and no different at 128
    scale, kv_heads = LOG2_E / math.sqrt(width), heads // groups
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    all_rows = T.GemmWarpPolicy.FullRow
    f32 = "float32"

    @T.macro
    def hide(
        scores: Any,
        query_ids: Any,
        key_ids: Any,
        documents: Any,
        row: Any,
        begin: Any,
        seen: Any,
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
                            num_steps = (
                                T.truncdiv(T.min(begin + ROWS, tokens) + columns - 1, columns) - low
                            )
                            T.barrier_wait(q_free[0], (lap & 1) ^ 1)
                            T.tma_copy(
                                q[row, begin : begin + ROWS, head, 0:width],
                                queries,
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
                                count = count + 1
            else:
                T.set_max_nreg(240, 1)
                group = (thread >> 7) - 1
                if turns:  # noqa: SIM102
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
                        num_steps = (
                            T.truncdiv(T.min(begin + ROWS, tokens) + columns - 1, columns) - low
                        )
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
                            queries,
                            keys[slot, :, :],
                            scores,
                            transpose_B=True,
                            policy=all_rows,
                            clear_accum=True,
                        )
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(scores, num_regs=columns // 2)
                        T.barrier_arrive(k_free[slot])
                        hide(scores, query_ids, key_ids, documents, row, begin, seen, full)
                        soften(scores, highest, before, fade, part, mass)
                        T.copy(scores, weights)
                        for _ in T.serial(1, num_steps):
                            old = slot
                            old_turn = turn
                            count = count + 1
                            slot = T.truncmod(count, stages)
                            turn = T.truncdiv(count, stages) & 1
                            T.barrier_wait(k_full[slot], turn)
                            if turns:
                                T.sync_threads(TURN + group, 256)
                            T.wgmma_gemm(
                                queries,
                                keys[slot, :, :],
                                scores,
                                transpose_B=True,
                                policy=all_rows,
                                clear_accum=True,
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
                        T.wgmma_gemm(weights, values[slot, :, :], total, policy=all_rows)
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
                            T.tma_copy(output[0, :, :], o[row, begin : begin + HALF, head, 0:width])
                        else:
                            T.tma_copy(
                                output[1, :, :],
                                o[row, begin + HALF : begin + ROWS, head, 0:width],
                            )
                T.tma_store_wait(0)

    return program


hopper_forward.options = OPTIONS
