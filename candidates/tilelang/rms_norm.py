"""RMSNorm, alone and fused with the addition to the residual stream, forward and backward.

y = x r w with r = 1 / sqrt(mean x^2 + eps), in float32, rounded once. The backward is, a row at a
time, dx = r (g - x r^2 mean(g x)) with g = dy w, and dw = sum over rows of dy x r. Each of P
workers sums the dw of its own rows into one line of [P, D], and a second kernel adds the lines: no
atomics, the same bits every time. Source: Zhang and Sennrich 2019, equation 4.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from candidates.tilelang.dialect import Dialect, dense, dialect_of, dtype_name, launch, launches_of

LARGEST_WIDTH = 16384  # a row must fit into the registers of one block
COLUMNS, LINES = 16, 128  # the tile of the last sum


def _row(d: Dialect, width: int) -> tuple[int, int]:
    """The width of a row's tile, and the threads that share it."""
    if not d.on_gpu:
        return width, 1
    threads = next((n for n in (32, 64, 128, 256) if width <= 32 * n), 512)
    return -(-width // (4 * threads)) * 4 * threads, threads


def _workers(d: Dialect, width: int) -> tuple[int, int, int]:
    """Of the backward: the width of a row's tile, the threads of a block, blocks on a processor.

    Twelve to sixteen elements a thread, so that this row, the next one and the sums fit into its
    registers beside those of the other blocks.
    """
    if not d.on_gpu:
        return width, 1, 1
    threads = next((n for n in (64, 128, 256) if width <= 16 * n), 512)
    blocks = {64: 8, 128: 4, 256: 3, 512: 1}[threads]
    return -(-width // (2 * threads)) * 2 * threads, threads, blocks


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
    padded, threads, blocks = _workers(d, width)
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
    """dw [D] = the sum of the workers' lines, in their order."""
    columns = COLUMNS if d.on_gpu else width
    lines = LINES if d.on_gpu else 1
    num_workers = T.dynamic("num_workers")

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


def _parameters(x: Tensor, weight: Tensor) -> tuple[int, str, str]:
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(
            f"weight must be [{width}] for x {list(x.shape)}, got {list(weight.shape)}"
        )
    if not 1 <= width <= LARGEST_WIDTH:
        raise ValueError(f"rms_norm takes rows of 1 to {LARGEST_WIDTH} elements, got {width}")
    return width, dtype_name("rms_norm", x), dtype_name("rms_norm", weight)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """total (empty without a residual), y, r."""
    parameters = _parameters(x, weight)
    x_rows, rows = dense(x), x.shape[:-1]
    y, inverse_rms = x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)
    other = x_rows if residual is None else dense(residual)
    total = y if residual is None else x.new_empty(x.shape)
    flat = (-1, x.shape[-1])
    if x.numel():
        launch(
            rms_norm_forward, dialect_of(x), (*parameters, residual is not None),
            x_rows.view(flat), other.view(flat), dense(weight), total.view(flat),
            y.view(flat), inverse_rms.view(-1), eps,
        )  # fmt: skip
    return total, y, inverse_rms


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    parameters, d = _parameters(x, weight), dialect_of(x)
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    flat, width = (-1, x.shape[-1]), x.shape[-1]
    if not x.numel():
        return dx, dweight.zero_()
    dy, x = dense(dy), dense(x)
    other = dy if dtotal is None else dense(dtotal)
    num_workers = min(inverse_rms.numel(), d.num_workers * _workers(d, width)[2])
    parts = x.new_empty(num_workers, width, dtype=torch.float32)
    launch(
        rms_norm_backward, d, (*parameters, dtotal is not None), dy.view(flat), other.view(flat),
        x.view(flat), dense(weight), inverse_rms.view(-1), dx.view(flat), parts,
    )  # fmt: skip
    launch(sum_of_parts, d, (width, parameters[2]), parts, dweight)
    return dx, dweight


# --- as operators of torch: schema, shapes for tracing, autograd -------------------------------

NAMESPACE = "touchstone_tilelang"


@torch.library.custom_op(f"{NAMESPACE}::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _, y, inverse_rms = _forward(x, None, weight, eps)
    return y, inverse_rms


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    return _backward(dy, None, x, weight, inverse_rms)


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    return *_rms_norm_backward(dy, *ctx.saved_tensors), None


_rms_norm.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op(f"{NAMESPACE}::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {x.dtype} {list(x.shape)} like x, got {residual.dtype} "
            f"{list(residual.shape)}"
        )
    total, y, inverse_rms = _forward(x, residual, weight, eps)
    return y, total, inverse_rms


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), rows


@torch.library.custom_op(f"{NAMESPACE}::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    return _backward(dy, dtotal, total, weight, inverse_rms)


@_add_rms_norm_backward.register_fake
def _(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _keep_total(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])


def _differentiate_sum(ctx: Any, dy: Tensor, dtotal: Tensor, _: Any) -> tuple[Any, ...]:
    dx, dweight = _add_rms_norm_backward(dy, dtotal, *ctx.saved_tensors)
    return dx, dx, dweight, None


_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_keep_total)

# --- the roles ---------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y [..., D] = x / sqrt(mean(x^2) + eps) * weight in x's dtype; x [..., D], weight [D].

    Raises ValueError for a dtype that the device does not take, and for D over LARGEST_WIDTH.
    """
    y: Tensor = _rms_norm(x, weight, eps)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, total): total = x + residual, rounded to their dtype, and y = rms_norm(total)."""
    y, total, _ = _add_rms_norm(x, residual, weight, eps)
    return y, total


rms_norm.kernel_calls = launches_of("rms_norm_forward", "rms_norm_backward", "sum_of_parts")
add_rms_norm.kernel_calls = rms_norm.kernel_calls
