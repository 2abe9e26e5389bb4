"""The kernels of the last layer and the cross-entropy together.

The first multiplies hidden by the weight and keeps of each tile of logits z a base a, the sum of
e = exp(z - a), and e itself. Except in float16 a is an estimate of the row's largest logit, the
same for all its tiles, unless a tile has a logit so far above that e would overflow. The second
puts the tiles of a row together, with A = max_tiles a, S = sum_tiles exp(a - A) sum e,
nll = A + log S - z_label and p_label = exp(z_label - A) / S, multiplies e by exp(a - A) where a
tile's base is another, and takes the label's e away: nothing is read or written but that element,
unless the estimate was too low. float16 has no room for S: there a is the tile's largest logit, and
the second kernel divides.

dlogits is e / S, but p_label - 1 at the label, which is orders larger than all others: it stays in
float32 and joins each gradient by itself, once. A sum in 16 bits that held it from the first chunk
on would lose what later chunks add. Where a label is frequent the two nearly cancel: see
token_nll_weight.py.
"""

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from candidates.tilelang.dialect import Dialect
from candidates.tilelang.matrix import on_tensor_cores, operand_shapes, tile_of, tile_sum

BLOCKS = 4  # on a processor, of the float32 products
THREADS = 256  # of the second kernel
CPU_COLUMNS = 64
TILES = 16  # of a row that one step of the second kernel multiplies
HEADROOM = 40.0  # nats over the estimate: e^40 V, times a weight of 1e15, is within float32
FLOAT16_SCALE = 16.0  # keeps 1 / V of a large vocabulary out of float16's subnormal numbers
LOG2_E = 1.4426950408889634


def divides_late(dtype: str) -> bool:
    """Whether the exponentials are divided by their sum in the products, not one by one."""
    return dtype != "float16"


def vocabulary_tile(d: Dialect, vocabulary: int, dtype: str) -> int:
    """Columns of one tile of logits."""
    return tile_of(d, (0, vocabulary, 0), dtype)[0][1]


def logit_tiles(d: Dialect, vocabulary: int, width: int, dtype: str, keep: bool) -> Any:
    """Of each tile of logits the base, sum of exponentials and, with `keep`, exponentials.

    Each worker takes every num_workers-th tile: the loads of its next one run during the end of
    this one. num_workers is compiled in; any number is right.

    hidden [num_rows, D], weight [V, D], labels and estimates [num_rows]; bases and sums
    [num_rows, num_tiles], label_logits [num_rows], exponentials [num_rows, num_tiles * tile], zeros
    after V. Width 0: D is known at launch.
    """
    tile, threads = tile_of(d, (0, vocabulary, width), dtype)
    bm, bn, _ = tile
    half, num_tiles = bn // 2, -(-vocabulary // bn)
    num_rows, inner = T.dynamic("num_rows"), width or T.dynamic("width")
    shapes = operand_shapes(d, (num_rows, vocabulary, inner), (False, True), dtype)
    add_products = tile_sum(d, tile, inner, (False, True), dtype)
    kept_columns = num_tiles * bn if keep else 1
    tensor_cores = on_tensor_cores(d, dtype)
    num_workers = d.num_workers if tensor_cores or not d.on_gpu else d.num_workers * BLOCKS

    @T.prim_func
    def program(
        hidden: T.Tensor(shapes[0], dtype),
        weight: T.Tensor(shapes[1], dtype),
        labels: T.Tensor((num_rows,), "int64"),
        estimates: T.Tensor((num_rows,), "float32"),
        bases: T.Tensor((num_rows, num_tiles), "float32"),
        sums: T.Tensor((num_rows, num_tiles), "float32"),
        label_logits: T.Tensor((num_rows,), "float32"),
        exponentials: T.Tensor((num_rows, kept_columns), dtype),
    ):
        with d.grid(num_workers, num_threads=threads) as worker:
            task, by = T.alloc_var("int32"), T.alloc_var("int32")
            row, column = T.alloc_var("int32"), T.alloc_var("int32")
            total = d.registers((bm, bn), "float32")
            base = d.registers((bm,), "float32")
            summed = d.registers((bm,), "float32")
            wanted = d.registers((bm,), "int32")
            row_tiles = T.ceildiv(num_rows, bm)
            for turn in T.serial(T.ceildiv(row_tiles * num_tiles - worker, num_workers)):
                # Row tiles first: what runs together shares the chunk and a few columns.
                task = turn * num_workers + worker
                by = task // row_tiles
                row = (task - by * row_tiles) * bm
                column = by * bn
                T.fill(total, 0)
                add_products(hidden, weight, total, row, column)
                for i in d.each(bm):
                    wanted[i] = T.cast(labels[row + i] - column, "int32")
                for i, j in d.each(bm, bn):
                    if wanted[i] == j:
                        label_logits[row + i] = total[i, j]
                if column + bn > vocabulary:
                    for i, j in d.each(bm, bn):
                        total[i, j] = T.if_then_else(
                            column + j < vocabulary, total[i, j], -T.infinity("float32")
                        )
                T.reduce_max(total, base, dim=1)
                if divides_late(dtype):
                    for i in d.each(bm):
                        base[i] = T.if_then_else(
                            base[i] <= estimates[row + i] + HEADROOM, estimates[row + i], base[i]
                        )
                if tensor_cores:  # one multiply-add and one exp2
                    for i, j in d.each(bm, bn):
                        total[i, j] = T.exp2(total[i, j] * LOG2_E - base[i] * LOG2_E)
                else:
                    for i, j in d.each(bm, bn):
                        total[i, j] = T.exp(total[i, j] - base[i])
                T.reduce_sum(total, summed, dim=1)
                for i in d.each(bm):
                    bases[row + i, by] = base[i]
                    sums[row + i, by] = summed[i]
                if keep:
                    if tensor_cores:  # through shared memory, half at a time: whole lines go out
                        out = d.shared((bm, half), dtype)
                        for part in T.unroll(2):
                            first = column + part * half
                            T.copy(total[0:bm, part * half : part * half + half], out)
                            T.copy(out, exponentials[row : row + bm, first : first + half])
                    else:
                        T.copy(total, exponentials[row : row + bm, column : column + bn])

    return program


def _options(vocabulary: int, width: int, dtype: str, keep: bool) -> dict[str, Any]:
    """In 16 bits exp2 is one instruction, without the four that keep subnormal numbers."""
    return {} if dtype == "float32" else {PassConfigKey.TL_ENABLE_FAST_MATH: True}


logit_tiles.options = _options


def logit_gradients(d: Dialect, vocabulary: int, columns: int, dtype: str, keep: bool) -> Any:
    """nll [num_rows], 0 without a target; with `keep` what the gradients of nll are made of.

    The exponentials become dlogits / shares but for the label, where they become 0; label_slopes
    [num_rows] are p_label - 1. Without a target both factors are 0. Where `divides_late(dtype)`
    shares [num_rows] are 1 / S, and the exponentials keep their size; in float16 these are
    FLOAT16_SCALE / S times as large, 0 without a target, and shares 1 / FLOAT16_SCALE.
    """
    num_tiles = -(-vocabulary // columns)
    kept = (num_tiles, columns) if keep else (1, 1)
    step = TILES if d.on_gpu else 1
    padded = -(-num_tiles // THREADS) * THREADS if d.on_gpu else num_tiles
    late = divides_late(dtype)
    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def program(
        labels: T.Tensor((num_rows,), "int64"),
        bases: T.Tensor((num_rows, num_tiles), "float32"),
        sums: T.Tensor((num_rows, num_tiles), "float32"),
        label_logits: T.Tensor((num_rows,), "float32"),
        exponentials: T.Tensor((num_rows, *kept), dtype),
        shares: T.Tensor((num_rows,), "float32"),
        label_slopes: T.Tensor((num_rows,), "float32"),
        nll: T.Tensor((num_rows,), "float32"),
    ):
        with d.grid(num_rows, num_threads=THREADS) as row:
            base = d.registers((1, padded), "float32")
            summed = d.registers((1, padded), "float32")
            top = d.registers((1,), "float32")
            least = d.registers((1,), "float32")
            all_summed = d.registers((1,), "float32")
            has_target = labels[row] >= 0
            for z, t in d.each(1, padded):  # the last one again, beyond the end
                base[z, t] = bases[row, T.min(t, num_tiles - 1)]
            T.reduce_max(base, top, dim=1)
            T.reduce_min(base, least, dim=1)
            for z, t in d.each(1, padded):
                summed[z, t] = T.if_then_else(
                    t < num_tiles, sums[row, t] * T.exp(base[z, t] - top[z]), 0.0
                )
            T.reduce_sum(summed, all_summed, dim=1)
            for z in d.each(1):
                nll[row + z] = T.if_then_else(
                    has_target, T.log(all_summed[z]) + (top[z] - label_logits[row]), 0.0
                )
            if keep:
                if least[0] < top[0] or not late:
                    factor = d.shared((padded + step,), "float32")
                    for z, t in d.each(1, padded):
                        share = 1.0 if late else FLOAT16_SCALE / all_summed[z]
                        factor[t] = T.exp(base[z, t] - top[z]) * share
                    tile = d.registers((step, columns), dtype)
                    for part in T.serial(T.ceildiv(num_tiles, step)):
                        first = part * step
                        T.copy(exponentials[row, first : first + step, 0:columns], tile)
                        for t, j in d.each(step, columns):
                            wide = T.cast(tile[t, j], "float32") * factor[first + t]
                            tile[t, j] = T.cast(T.if_then_else(has_target, wide, 0.0), dtype)
                        T.copy(tile, exponentials[row, first : first + step, 0:columns])
                    if d.on_gpu:
                        T.sync_threads()
                for z in d.each(1):
                    if has_target:
                        exponentials[row + z, labels[row] // columns, labels[row] % columns] = (
                            T.cast(0.0, dtype)
                        )
                    share = 1.0 / all_summed[z] if late else 1.0 / FLOAT16_SCALE
                    shares[row + z] = T.if_then_else(has_target, share, 0.0)
                    label_slopes[row + z] = T.if_then_else(
                        has_target,
                        (T.exp(label_logits[row] - top[z]) - all_summed[z]) / all_summed[z],
                        0.0,
                    )

    return program


def with_label(d: Dialect, width: int, dtype: str) -> Any:
    """dhidden [num_rows, D] = product * shares + weight_label * label_slopes, rounded once.

    The product of exponentials and weight is float32. Width 0: D is known at launch.
    """
    columns = THREADS * 4 if d.on_gpu else CPU_COLUMNS
    num_rows, vocabulary = T.dynamic("num_rows"), T.dynamic("vocabulary")
    width = width or T.dynamic("width")

    @T.prim_func
    def program(
        product: T.Tensor((num_rows, width), "float32"),
        weight: T.Tensor((vocabulary, width), dtype),
        labels: T.Tensor((num_rows,), "int64"),
        shares: T.Tensor((num_rows,), "float32"),
        label_slopes: T.Tensor((num_rows,), "float32"),
        dhidden: T.Tensor((num_rows, width), dtype),
    ):
        with d.grid(num_rows, num_threads=THREADS) as row:
            for part in T.serial(T.ceildiv(width, columns)):
                for j in d.each(columns):
                    column = part * columns + j
                    if column < width:
                        of_label = weight[T.max(labels[row], 0), column]
                        dhidden[row, column] = T.cast(
                            product[row, column] * shares[row]
                            + T.cast(of_label, "float32") * label_slopes[row],
                            dtype,
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
