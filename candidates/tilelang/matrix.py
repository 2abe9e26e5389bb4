"""Matrix products in tiles, and column sums, without atomics: the same bits every time.

16-bit operands go through the tensor cores. float32 operands go through float32 multiply-adds,
since the tensor cores would round them to TF32, and are summed a tile at a time, so that the error
grows slowly with the inner size. Both accumulate in float32 and round once.
"""

from typing import Any

import tilelang.language as T
import torch
import torch.nn.functional as F
from torch import Tensor

from candidates.tilelang.dialect import Dialect, dialect_of, dtype_name, launch
from candidates.tilelang.rms_norm_kernels import sum_of_parts

Sizes = tuple[int, int, int]  # rows, columns and inner size of a product; 0: known at launch
FLOAT32_TILE, CPU_TILE, PAD = (64, 64, 32), (8, 16, 32), 4
STAGES = 4  # loads of a tile run up to three tiles ahead
POLICY = T.GemmWarpPolicy.FullRow  # each warpgroup takes whole lines of the tile
PANEL = 8  # lines of tiles that run together, so that their operands stay in the L2 cache
LARGEST_ROWS = 65535 * FLOAT32_TILE[0]  # the second extent of a launch is 16 bits
COLUMNS, LINES = 128, 16  # the tile of a column sum


def on_tensor_cores(d: Dialect, dtype: str) -> bool:
    """Whether products of this dtype go through a GPU's tensor cores, and not its multiply-adds."""
    return d.on_gpu and dtype != "float32"


def tile_of(d: Dialect, sizes: Sizes, dtype: str) -> tuple[Sizes, int]:
    """Rows, columns and inner size of a block's tile, and its threads."""
    if not d.on_gpu:
        return CPU_TILE, 1
    if dtype == "float32":
        return FLOAT32_TILE, 128
    rows, columns, _ = sizes
    if 0 < columns <= 64 or 0 < rows <= 64:
        return (64, 64, 64), 128
    return (128, 256, 64) if columns % 256 == 0 or columns > 1024 else (128, 128, 64), 256


def _up(size: Any, multiple: int) -> Any:
    return -(-size // multiple) * multiple if multiple > 1 else size


def line_multiple(d: Dialect, dtype: str) -> int:
    """What the length of an operand's lines must divide by: the tile loads move 16 bytes."""
    return 8 if on_tensor_cores(d, dtype) else 1


def tile_sum(d: Dialect, tile: Sizes, inner: Any, transposed: tuple[bool, bool], dtype: str) -> Any:
    """A macro that adds a b to `total`, the tile of the product that starts at (row, column).

    a is [rows, inner], b [inner, columns], each the other way round if it is transposed.
    """
    bm, bn, bk = tile
    a_transposed, b_transposed = transposed
    a_tile = (bk, bm) if a_transposed else (bm, bk)
    b_tile = (bn, bk) if b_transposed else (bk, bn)

    @T.macro
    def tensor_core_sum(a, b, total, row, column):  # type: ignore[no-untyped-def]
        ta, tb = d.shared(a_tile, dtype), d.shared(b_tile, dtype)
        for step in d.pipelined(0, T.ceildiv(inner, bk), STAGES):
            first = step * bk
            if a_transposed:
                T.copy(a[first : first + bk, row : row + bm], ta)
            else:
                T.copy(a[row : row + bm, first : first + bk], ta)
            if b_transposed:
                T.copy(b[column : column + bn, first : first + bk], tb)
            else:
                T.copy(b[first : first + bk, column : column + bn], tb)
            T.gemm(
                ta, tb, total, transpose_A=a_transposed, transpose_B=b_transposed, policy=POLICY
            )  # fmt: skip

    @T.macro
    def plain_sum(a, b, total, row, column):  # type: ignore[no-untyped-def]
        # Both tiles inner index first, their lines apart by PAD so that writes spread over banks.
        ta, tb = d.shared((bk, bm + PAD), "float32"), d.shared((bk, bn + PAD), "float32")
        part = d.registers((bm, bn), "float32")
        for step in T.serial(T.ceildiv(inner, bk)):
            first = step * bk
            if a_transposed:
                for k, i in d.each(bk, bm):
                    ta[k, i] = T.cast(a[first + k, row + i], "float32")
            else:
                for i, k in d.each(bm, bk):
                    ta[k, i] = T.cast(a[row + i, first + k], "float32")
            if b_transposed:
                for j, k in d.each(bn, bk):
                    tb[k, j] = T.cast(b[column + j, first + k], "float32")
            else:
                for k, j in d.each(bk, bn):
                    tb[k, j] = T.cast(b[first + k, column + j], "float32")
            T.fill(part, 0)
            for k in T.serial(bk):
                for i, j in d.each(bm, bn):
                    part[i, j] = part[i, j] + ta[k, i] * tb[k, j]
            for i, j in d.each(bm, bn):
                total[i, j] = total[i, j] + part[i, j]

    return tensor_core_sum if on_tensor_cores(d, dtype) else plain_sum


def operand_shapes(
    d: Dialect, sizes: tuple[Any, Any, Any], transposed: tuple[bool, bool], dtype: str
) -> Any:
    """The shapes of a and b, their lines padded with zeros to whole 16-byte loads where needed."""
    rows, columns, inner = sizes
    multiple = line_multiple(d, dtype)
    a_shape = (inner, _up(rows, multiple)) if transposed[0] else (rows, _up(inner, multiple))
    b_shape = (columns, _up(inner, multiple)) if transposed[1] else (inner, _up(columns, multiple))
    return a_shape, b_shape


def matrix_product(
    d: Dialect, sizes: Sizes, transposed: tuple[bool, bool], dtype: str, biased: bool
) -> Any:
    """c [rows, columns] = a b + bias, where a or b may be stored transposed; bias [columns]."""
    rows = sizes[0] or T.dynamic("rows")
    columns = sizes[1] or T.dynamic("columns")
    inner = sizes[2] or T.dynamic("inner")
    tile, threads = tile_of(d, sizes, dtype)
    bm, bn, _ = tile
    a_shape, b_shape = operand_shapes(d, (rows, columns, inner), transposed, dtype)
    add_products = tile_sum(d, tile, inner, transposed, dtype)
    tensor_cores = on_tensor_cores(d, dtype)

    @T.prim_func
    def program(
        a: T.Tensor(a_shape, dtype),
        b: T.Tensor(b_shape, dtype),
        bias: T.Tensor((columns if biased else 1,), dtype),
        c: T.Tensor((rows, columns), dtype),
    ):
        with d.grid(T.ceildiv(columns, bn), T.ceildiv(rows, bm), num_threads=threads) as (bx, by):
            if d.on_gpu:
                T.use_swizzle(panel_size=PANEL)
            row, column = by * bm, bx * bn
            total = d.registers((bm, bn), "float32")
            T.fill(total, 0)
            add_products(a, b, total, row, column)
            if biased:
                for i, j in d.each(bm, bn):
                    total[i, j] = total[i, j] + T.cast(bias[column + j], "float32")
            if tensor_cores:  # through shared memory: whole lines go out
                out = d.shared((bm, bn), dtype)
                T.copy(total, out)
                T.copy(out, c[row : row + bm, column : column + bn])
            else:
                T.copy(total, c[row : row + bm, column : column + bn])

    return program


def column_parts(d: Dialect, width: int, dtype: str) -> Any:
    """Each worker's sum of its rows of x [num_rows, width]: parts [num_workers, width]."""
    columns, lines = COLUMNS, LINES if d.on_gpu else 1
    num_rows, num_workers = T.dynamic("num_rows"), T.dynamic("num_workers")
    width = width or T.dynamic("width")

    @T.prim_func
    def program(
        x: T.Tensor((num_rows, width), dtype), parts: T.Tensor((num_workers, width), "float32")
    ):
        with d.grid(T.ceildiv(width, columns), num_workers) as (block, worker):
            first = block * columns
            tile = d.registers((lines, columns), dtype)
            total = d.registers((lines, columns), "float32")
            column = d.registers((columns,), "float32")
            T.fill(total, 0)
            for step in T.serial(T.ceildiv(num_rows - worker * lines, num_workers * lines)):
                row = (step * num_workers + worker) * lines
                T.copy(x[row : row + lines, first : first + columns], tile)
                for i, j in d.each(lines, columns):
                    total[i, j] = total[i, j] + T.cast(tile[i, j], "float32")
            T.reduce_sum(total, column, dim=0)
            T.copy(column, parts[worker, first : first + columns])

    return program


def with_padded_lines(x: Tensor, multiple: int) -> Tensor:
    """x with zeros at the end of each line, so that its length divides by `multiple`."""
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def product(
    a: Tensor, b: Tensor, transposed: tuple[bool, bool], static: tuple[bool, bool, bool],
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a b + bias of dense matrices; `static`: which of rows, columns, inner a GPU compiles in."""
    rows, inner = (a.shape[1], a.shape[0]) if transposed[0] else (a.shape[0], a.shape[1])
    columns = b.shape[0] if transposed[1] else b.shape[1]
    c = a.new_empty(rows, columns)
    if not inner:
        return c.zero_() if bias is None else c.copy_(bias.expand_as(c))
    if rows > LARGEST_ROWS:
        raise ValueError(f"a product takes up to {LARGEST_ROWS} rows, got {rows}; split them")
    if c.numel():
        d, dtype = dialect_of(a), dtype_name("linear", a)
        sizes = tuple(
            size if fixed and d.on_gpu else 0
            for size, fixed in zip((rows, columns, inner), static, strict=True)
        )
        a, b = (with_padded_lines(x, line_multiple(d, dtype)) for x in (a, b))
        added = a.view(-1)[:1] if bias is None else bias  # not read without a bias
        parameters = (sizes, transposed, dtype, bias is not None)
        launch(matrix_product, d, parameters, a, b, added, c)
    return c


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows of x [num_rows, width] in x's dtype, in a fixed order, in float32."""
    num_rows, width = x.shape
    if not x.numel():
        return x.new_zeros(width)
    d, dtype = dialect_of(x), dtype_name("linear", x)
    num_workers = min(-(-num_rows // LINES), d.num_workers) if d.on_gpu else 1
    parts, total = x.new_empty(num_workers, width, dtype=torch.float32), x.new_empty(width)
    parameters = (width if d.on_gpu else 0, dtype)
    launch(column_parts, d, parameters, x, parts)
    launch(sum_of_parts, d, parameters, parts, total)
    return total
