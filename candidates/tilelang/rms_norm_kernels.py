"""The TileLang programs of RMSNorm, alone and fused with the addition to the residual stream.

y = x r w with r = 1 / sqrt(mean x^2 + eps), in float32, rounded once. The backward is, a row at a
time, dx = r (g - x r^2 mean(g x)) with g = dy w, and dw = sum over rows of dy x r. Each of P
workers sums the dw of its own rows into one line of [P, D], and a second kernel adds the lines: no
atomics, the same bits every time. Source: Zhang and Sennrich 2019, equation 4.
"""

from typing import Any

import tilelang.language as T

from candidates.tilelang.dialect import Dialect

COLUMNS, LINES = 16, 128  # the tile of the last sum on a GPU
CPU_COLUMNS = 64
REGISTERS = 65536  # of a processor
OTHER_REGISTERS = 13  # of a thread of the backward: addresses, counters
MOST_BLOCKS = 8  # on a processor: more blocks leave more parts to add up


def _row(d: Dialect, width: int) -> tuple[int, int]:
    """The width of a row's tile, and the threads that share it."""
    if not d.on_gpu:
        return width, 1
    threads = next((n for n in (32, 64, 128, 256) if width <= 32 * n), 512)
    return -(-width // (4 * threads)) * 4 * threads, threads


def workers(d: Dialect, width: int, dtype: str, adds: bool) -> tuple[int, int, int]:
    """Of the backward: the width of a row's tile, the threads of a block, blocks on a processor.

    As many blocks as hold in registers, for each element of a thread's share of the row, x, dy and
    the residual's cotangent twice (this row's and the next's), the gain, and two float32 sums.
    """
    if not d.on_gpu:
        return width, 1, 1
    threads = next((n for n in (64, 128, 256) if width <= 16 * n), 512)
    padded = -(-width // (2 * threads)) * 2 * threads
    words = (2 * (3 if adds else 2) + 1) * (4 if dtype == "float32" else 2) / 4 + 2
    registers = OTHER_REGISTERS + padded // threads * words
    return padded, threads, max(1, min(MOST_BLOCKS, int(REGISTERS // (threads * registers))))


def rms_norm_forward(d: Dialect, width: int, dtype: str, gain_dtype: str, adds: bool) -> Any:
    """y and r [num_rows]; with `adds` also total = x + residual, of which y is the norm."""
    padded, threads = _row(d, width)
    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def program(
        x: T.Tensor((num_rows, width), dtype),
        residual: T.Tensor((num_rows, width), dtype),
        gain: T.Tensor((width,), gain_dtype),
        total: T.Tensor((num_rows, width), dtype),
        y: T.Tensor((num_rows, width), dtype),
        inverse_rms: T.Tensor((num_rows,), "float32"),
        eps: T.float32,
    ):
        with d.grid(num_rows, num_threads=threads) as row:
            tile = d.registers((1, padded), dtype)
            wide = d.registers((1, padded), "float32")
            scale = d.registers((1,), "float32")
            T.copy(x[row : row + 1, 0:padded], tile)
            if adds:
                other = d.registers((1, padded), dtype)
                T.copy(residual[row : row + 1, 0:padded], other)
                for i, j in d.each(1, padded):
                    wide[i, j] = T.cast(tile[i, j], "float32") + T.cast(other[i, j], "float32")
                for i, j in d.each(1, padded):
                    tile[i, j] = T.cast(wide[i, j], dtype)
                T.copy(tile, total[row : row + 1, 0:padded])
            for i, j in d.each(1, padded):
                wide[i, j] = T.cast(tile[i, j], "float32") * T.cast(tile[i, j], "float32")
            T.reduce_sum(wide, scale, dim=1)
            for i in d.each(1):
                scale[i] = 1.0 / T.sqrt(scale[i] / width + eps)
            T.copy(scale, inverse_rms[row : row + 1])
            for i, j in d.each(1, padded):
                wide[i, j] = T.cast(tile[i, j], "float32") * scale[i] * T.cast(gain[j], "float32")
            T.copy(wide, y[row : row + 1, 0:padded])

    return program


def rms_norm_backward(d: Dialect, width: int, dtype: str, gain_dtype: str, adds: bool) -> Any:
    """dx [num_rows, D] and each worker's part of dw [num_workers, D].

    With `adds`, x is the total, and the cotangent of the total itself is added to dx. A worker has
    its next row on the way into registers while it works on this one.
    """
    padded, threads, blocks = workers(d, width, dtype, adds)
    num_rows, num_workers = T.dynamic("num_rows"), T.dynamic("num_workers")

    @T.prim_func
    def program(
        dy: T.Tensor((num_rows, width), dtype),
        dtotal: T.Tensor((num_rows, width), dtype),
        x: T.Tensor((num_rows, width), dtype),
        gain: T.Tensor((width,), gain_dtype),
        inverse_rms: T.Tensor((num_rows,), "float32"),
        dx: T.Tensor((num_rows, width), dtype),
        parts: T.Tensor((num_workers, width), "float32"),
    ):
        with d.grid(num_workers, num_threads=threads) as worker:
            dy_next, dy_row = (d.registers((1, padded), dtype) for _ in range(2))
            x_next, x_row = (d.registers((1, padded), dtype) for _ in range(2))
            dtotal_next, dtotal_row = (d.registers((1, padded), dtype) for _ in range(2))
            scale_next, scale = (d.registers((1,), "float32") for _ in range(2))
            gain_row = d.registers((1, padded), gain_dtype)
            product = d.registers((1, padded), "float32")
            dgain = d.registers((1, padded), "float32")
            mean = d.registers((1,), "float32")
            if d.on_gpu:
                T.annotate_min_blocks_per_sm(blocks)
            T.fill(dgain, 0)
            for i, j in d.each(1, padded):
                gain_row[i, j] = gain[j]
            T.copy(dy[worker : worker + 1, 0:padded], dy_next)
            T.copy(x[worker : worker + 1, 0:padded], x_next)
            T.copy(inverse_rms[worker : worker + 1], scale_next)
            if adds:
                T.copy(dtotal[worker : worker + 1, 0:padded], dtotal_next)
            for step in T.serial(T.ceildiv(num_rows - worker, num_workers)):
                row = step * num_workers + worker
                after = row + num_workers
                T.copy(dy_next, dy_row)
                T.copy(x_next, x_row)
                T.copy(scale_next, scale)
                T.copy(dy[after : after + 1, 0:padded], dy_next)
                T.copy(x[after : after + 1, 0:padded], x_next)
                T.copy(inverse_rms[after : after + 1], scale_next)
                if adds:
                    T.copy(dtotal_next, dtotal_row)
                    T.copy(dtotal[after : after + 1, 0:padded], dtotal_next)
                for i, j in d.each(1, padded):
                    product[i, j] = (
                        T.cast(dy_row[i, j], "float32") * T.cast(x_row[i, j], "float32") * scale[i]
                    )
                for i, j in d.each(1, padded):
                    dgain[i, j] = dgain[i, j] + product[i, j]
                for i, j in d.each(1, padded):
                    product[i, j] = product[i, j] * T.cast(gain_row[i, j], "float32")
                T.reduce_sum(product, mean, dim=1)
                for i in d.each(1):
                    mean[i] = mean[i] / width * scale[i]
                for i, j in d.each(1, padded):
                    product[i, j] = scale[i] * (
                        T.cast(dy_row[i, j], "float32") * T.cast(gain_row[i, j], "float32")
                        - T.cast(x_row[i, j], "float32") * mean[i]
                    )
                if adds:
                    for i, j in d.each(1, padded):
                        product[i, j] = product[i, j] + T.cast(dtotal_row[i, j], "float32")
                for i, j in d.each(1, padded):
                    dy_row[i, j] = T.cast(product[i, j], dtype)
                T.copy(dy_row, dx[row : row + 1, 0:padded])
            for i, j in d.each(1, padded):
                parts[worker, j] = dgain[i, j]

    return program


def sum_of_parts(d: Dialect, width: int, gain_dtype: str) -> Any:
    """dw [D] = the sum of the workers' lines, in a fixed order. Width 0: D is known at launch."""
    columns, lines = (COLUMNS, LINES) if d.on_gpu else (CPU_COLUMNS, 1)
    num_workers = T.dynamic("num_workers")
    width = width or T.dynamic("width")

    @T.prim_func
    def program(
        parts: T.Tensor((num_workers, width), "float32"), dgain: T.Tensor((width,), gain_dtype)
    ):
        with d.grid(T.ceildiv(width, columns)) as block:
            first = block * columns
            tile = d.registers((lines, columns), "float32")
            total = d.registers((lines, columns), "float32")
            column = d.registers((columns,), "float32")
            T.fill(total, 0)
            for step in T.serial(T.ceildiv(num_workers, lines)):
                T.copy(parts[step * lines : step * lines + lines, first : first + columns], tile)
                for i, j in d.each(lines, columns):
                    total[i, j] = total[i, j] + tile[i, j]
            T.reduce_sum(total, column, dim=0)
            T.copy(column, dgain[first : first + columns])

    return program
