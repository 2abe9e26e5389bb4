"""The kernels of the last layer and the cross-entropy together, in chunks of rows.

A first kernel multiplies a chunk of hidden by the weight and keeps of each tile of logits z its
maximum a, its sum of exp(z - a), and exp(z - a) itself, in float16 for 16-bit inputs: the rounding
is relative to the tile, whatever the size of the logits. A second kernel puts the tiles of a row
together, lse = log(sum_tiles exp(a) sum exp(z - a)), nll = lse - z_label, and turns exp(z - a) in
place into dlogits = exp(z - a) exp(a - lse) - onehot. The products dlogits W and dlogits^T hidden
are torch's. All logits never exist at once.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from candidates.tilelang.dialect import Dialect, dialect_of, launch
from candidates.tilelang.matrix import (
    line_multiple,
    operand_shapes,
    tile_of,
    tile_sum,
    with_padded_lines,
)

CHUNK_BYTES = 640 * 2**20  # at most, of a chunk's exponentials
CHUNK_ROWS = 128  # chunks are multiples of this
THREADS = 256  # of the second kernel
TILES = 16  # of a row that one step of the second kernel turns into gradients
TORCH = {"float16": torch.float16, "float32": torch.float32}
FLOAT16_SCALE = 16.0  # keeps 1 / V of a large vocabulary out of float16's subnormal numbers


def kept_dtype(dtype: str) -> str:
    """The dtype of a tile's exponentials: in [0, 1] float16 holds more digits than bfloat16."""
    return "float32" if dtype == "float32" else "float16"


def vocabulary_tile(d: Dialect, vocabulary: int, dtype: str) -> int:
    """Columns of one tile of logits."""
    return tile_of(d, (0, vocabulary, 0), dtype)[0][1]


def logit_tiles(d: Dialect, vocabulary: int, width: int, dtype: str, keep: bool) -> Any:
    """Of each tile of logits the maximum, sum of exponentials and, with `keep`, exponentials.

    hidden [num_rows, D], weight [V, D], labels [num_rows]; maxima and sums [num_rows, num_tiles],
    label_logits [num_rows], exponentials [num_rows, num_tiles * tile], zeros after V. Width 0: D is
    known at launch.
    """
    tile, threads = tile_of(d, (0, vocabulary, width), dtype)
    bm, bn, _ = tile
    num_tiles = -(-vocabulary // bn)
    num_rows, inner = T.dynamic("num_rows"), width or T.dynamic("width")
    shapes = operand_shapes(d, (num_rows, vocabulary, inner), (False, True), dtype)
    add_products = tile_sum(d, tile, inner, (False, True), dtype)
    kept_columns = num_tiles * bn if keep else 1

    @T.prim_func
    def program(
        hidden: T.Tensor(shapes[0], dtype),
        weight: T.Tensor(shapes[1], dtype),
        labels: T.Tensor((num_rows,), "int64"),
        maxima: T.Tensor((num_rows, num_tiles), "float32"),
        sums: T.Tensor((num_rows, num_tiles), "float32"),
        label_logits: T.Tensor((num_rows,), "float32"),
        exponentials: T.Tensor((num_rows, kept_columns), kept_dtype(dtype)),
    ):
        # Row tiles first: the blocks that run together share the chunk and a few columns.
        with d.grid(T.ceildiv(num_rows, bm), num_tiles, num_threads=threads) as (bx, by):
            row, column = bx * bm, by * bn
            total = d.registers((bm, bn), "float32")
            largest = d.registers((bm,), "float32")
            summed = d.registers((bm,), "float32")
            wanted = d.registers((bm,), "int32")
            T.fill(total, 0)
            add_products(hidden, weight, total, row, column)
            for i in d.each(bm):
                wanted[i] = T.cast(labels[row + i] - column, "int32")
            for i, j in d.each(bm, bn):
                if wanted[i] == j:
                    label_logits[row + i] = total[i, j]
            if vocabulary % bn:
                for i, j in d.each(bm, bn):
                    total[i, j] = T.if_then_else(
                        column + j < vocabulary, total[i, j], -T.infinity("float32")
                    )
            T.reduce_max(total, largest, dim=1)
            for i, j in d.each(bm, bn):
                total[i, j] = T.exp(total[i, j] - largest[i])
            T.reduce_sum(total, summed, dim=1)
            for i in d.each(bm):
                maxima[row + i, by] = largest[i]
                sums[row + i, by] = summed[i]
            if keep:
                if d.on_gpu and dtype != "float32":  # through shared memory: whole lines go out
                    out = d.shared((bm, bn), kept_dtype(dtype))
                    T.copy(total, out)
                    T.copy(out, exponentials[row : row + bm, column : column + bn])
                else:
                    T.copy(total, exponentials[row : row + bm, column : column + bn])

    return program


def logit_gradients(
    d: Dialect, vocabulary: int, columns: int, dtype: str, keep: bool, scale: float
) -> Any:
    """nll [num_rows], 0 without a target; with `keep` also scale * dlogits.

    exponentials and dlogits may be the same memory: each element is read before it is written.
    """
    num_tiles = -(-vocabulary // columns)
    kept = (num_tiles, columns) if keep else (1, 1)
    step = TILES if d.on_gpu else 1
    padded = -(-num_tiles // THREADS) * THREADS if d.on_gpu else num_tiles
    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def program(
        labels: T.Tensor((num_rows,), "int64"),
        maxima: T.Tensor((num_rows, num_tiles), "float32"),
        sums: T.Tensor((num_rows, num_tiles), "float32"),
        label_logits: T.Tensor((num_rows,), "float32"),
        exponentials: T.Tensor((num_rows, *kept), kept_dtype(dtype)),
        dlogits: T.Tensor((num_rows, *kept), dtype),
        nll: T.Tensor((num_rows,), "float32"),
    ):
        with d.grid(num_rows, num_threads=THREADS) as row:
            largest = d.registers((1, padded), "float32")
            summed = d.registers((1, padded), "float32")
            top = d.registers((1,), "float32")
            all_summed = d.registers((1,), "float32")
            factor = d.shared((padded + step,), "float32")
            has_target = labels[row] >= 0
            for z, t in d.each(1, padded):
                largest[z, t] = T.if_then_else(
                    t < num_tiles, maxima[row, T.min(t, num_tiles - 1)], -T.infinity("float32")
                )
            T.reduce_max(largest, top, dim=1)
            for z, t in d.each(1, padded):
                summed[z, t] = sums[row, t] * T.exp(largest[z, t] - top[z])
            T.reduce_sum(summed, all_summed, dim=1)
            for z in d.each(1):
                nll[row + z] = T.if_then_else(
                    has_target, T.log(all_summed[z]) + (top[z] - label_logits[row]), 0.0
                )
            if keep:
                for z, t in d.each(1, padded):
                    factor[t] = T.exp(largest[z, t] - top[z]) * (scale / all_summed[z])
                tile = d.registers((step, columns), kept_dtype(dtype))
                gradient = d.registers((step, columns), dtype)
                for part in T.serial(T.ceildiv(num_tiles, step)):
                    first = part * step
                    T.copy(exponentials[row, first : first + step, 0:columns], tile)
                    for t, j in d.each(step, columns):
                        wide = T.cast(tile[t, j], "float32") * factor[first + t]
                        gradient[t, j] = T.cast(T.if_then_else(has_target, wide, 0.0), dtype)
                    T.copy(gradient, dlogits[row, first : first + step, 0:columns])
                if d.on_gpu:
                    T.sync_threads()
                for z in d.each(1):
                    if has_target:
                        probability = T.exp(label_logits[row] - top[z]) / all_summed[z]
                        dlogits[row + z, labels[row] // columns, labels[row] % columns] = T.cast(
                            (probability - 1.0) * scale, dtype
                        )

    return program


def scaled(d: Dialect, line: int, dtype: str) -> Any:
    """y = x * factor in float32, rounded once; x is a flat tensor cut into short lines."""
    lines = THREADS * 4 if d.on_gpu else 256
    num_lines = T.dynamic("num_lines")

    @T.prim_func
    def program(
        x: T.Tensor((num_lines, line), dtype),
        factor: T.Tensor((1,), "float32"),
        y: T.Tensor((num_lines, line), dtype),
    ):
        with d.grid(T.ceildiv(num_lines, lines), num_threads=THREADS) as block:
            first = block * lines
            tile = d.registers((lines, line), dtype)
            T.copy(x[first : first + lines, 0:line], tile)
            for i, j in d.each(lines, line):
                tile[i, j] = T.cast(T.cast(tile[i, j], "float32") * factor[0], dtype)
            T.copy(tile, y[first : first + lines, 0:line])

    return program


def _rows_of_a_chunk(num_rows: int, bytes_of_a_row: int, bytes_of_weight: int) -> int:
    """As few chunks as the limit allows, of about equal size: fewer additions to dW.

    A chunk need not be smaller than the weight: the backward makes a scaled copy of dW anyway.
    """
    limit = min(CHUNK_BYTES, max(bytes_of_weight, CHUNK_BYTES // 4))
    largest = max(CHUNK_ROWS, limit // bytes_of_a_row // CHUNK_ROWS * CHUNK_ROWS)
    num_chunks = -(-num_rows // largest)
    return -(-num_rows // (num_chunks * CHUNK_ROWS)) * CHUNK_ROWS


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: str, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """nll [M], and the gradients of its sum by hidden and weight, empty where not needed."""
    d, keep = dialect_of(hidden), any(needed)
    (num_rows, width), vocabulary = hidden.shape, weight.shape[0]
    scale = FLOAT16_SCALE if dtype == "float16" else 1.0
    columns = vocabulary_tile(d, vocabulary, dtype)
    num_tiles = -(-vocabulary // columns)
    kept_columns = num_tiles * columns if keep else 1
    nll = hidden.new_empty(num_rows, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if needed[0] else (0,))
    dweight = weight.new_empty(weight.shape if needed[1] else (0,))
    if not num_rows:
        return nll, dhidden, dweight.zero_()
    size = _rows_of_a_chunk(num_rows, num_tiles * columns * hidden.element_size(), weight.nbytes)
    buffer = hidden.new_empty(min(size, num_rows), kept_columns)
    multiple = line_multiple(d, dtype)
    wide_hidden, wide_weight = (with_padded_lines(x, multiple) for x in (hidden, weight))
    for first in range(0, num_rows, size):
        rows = slice(first, min(first + size, num_rows))
        num = rows.stop - first
        maxima, sums = (nll.new_empty(num, num_tiles) for _ in range(2))
        label_logits = nll.new_empty(num)
        dlogits = buffer[:num]
        kept = dlogits.view(TORCH[kept_dtype(dtype)])
        launch(
            logit_tiles, d, (vocabulary, width if d.on_gpu else 0, dtype, keep), wide_hidden[rows],
            wide_weight, labels[rows], maxima, sums, label_logits, kept,
        )  # fmt: skip
        tiles = (num, -1, columns if keep else 1)
        launch(
            logit_gradients, d, (vocabulary, columns, dtype, keep, scale), labels[rows], maxima,
            sums, label_logits, kept.view(tiles), dlogits.view(tiles), nll[rows],
        )  # fmt: skip
        dlogits = dlogits[:, :vocabulary]
        if needed[0]:
            part = dhidden[rows]
            torch.addmm(part, dlogits, weight, beta=0, alpha=1 / scale, out=part)
        if needed[1]:
            torch.addmm(
                dweight, dlogits.T, hidden[rows], beta=int(first > 0), alpha=1 / scale, out=dweight
            )
    return nll, dhidden, dweight
