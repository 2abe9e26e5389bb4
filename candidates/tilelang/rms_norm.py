"""RMSNorm, alone and fused with the addition to the residual stream, forward and backward.

The programs and the formulas are in rms_norm_kernels.py. Saved for the backward are x, or with a
residual the total, the gain and the inverse RMS of each row.
"""

from typing import Any

import torch
from torch import Tensor

from candidates.tilelang.dialect import (
    NAMESPACE,
    dense,
    dialect_of,
    dtype_name,
    launch,
    launches_of,
)
from candidates.tilelang.rms_norm_kernels import (
    rms_norm_backward,
    rms_norm_forward,
    sum_of_parts,
    workers,
)

LARGEST_WIDTH = 16384  # a row must fit into the registers of one block


def _parameters(x: Tensor, weight: Tensor) -> tuple[int, str, str]:
    width = x.shape[-1] if x.ndim else 0
    if weight.shape != (width,) or weight.device != x.device:
        raise ValueError(
            f"weight must be [{width}] on {x.device} for x {list(x.shape)}, got "
            f"{list(weight.shape)} on {weight.device}"
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
    (width, dtype, gain_dtype), adds, d = _parameters(x, weight), dtotal is not None, dialect_of(x)
    dx, dweight, flat = x.new_empty(x.shape), weight.new_empty(weight.shape), (-1, width)
    if not x.numel():
        return dx, dweight.zero_()
    dy, x = dense(dy), dense(x)
    other = dy if dtotal is None else dense(dtotal)
    _, _, blocks = workers(d, width, dtype, adds)
    num_workers = min(inverse_rms.numel(), d.num_workers * blocks)
    parts = x.new_empty(num_workers, width, dtype=torch.float32)
    launch(
        rms_norm_backward, d, (width, dtype, gain_dtype, adds), dy.view(flat), other.view(flat),
        x.view(flat), dense(weight), inverse_rms.view(-1), dx.view(flat), parts,
    )  # fmt: skip
    launch(sum_of_parts, d, (width if d.on_gpu else 0, gain_dtype), parts, dweight)
    return dx, dweight


# --- as operators of torch: schema, shapes for tracing, autograd -------------------------------


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
    ctx.set_materialize_grads(False)  # no zeros for the inverse RMS


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    return *_rms_norm_backward(dy, *ctx.saved_tensors), None


_rms_norm.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op(f"{NAMESPACE}::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    alike = residual.shape == x.shape and residual.dtype == x.dtype
    if not alike or residual.device != x.device:
        raise ValueError(
            f"residual must be {x.dtype} {list(x.shape)} on {x.device} like x, got "
            f"{residual.dtype} {list(residual.shape)} on {residual.device}"
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
    ctx.set_materialize_grads(False)


def _differentiate_sum(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if dy is None and dtotal is None:
        return None, None, None, None
    saved = ctx.saved_tensors  # once: under activation checkpointing it computes
    dy, dtotal = (torch.zeros_like(saved[0]) if d is None else d for d in (dy, dtotal))
    dx, dweight = _add_rms_norm_backward(dy, dtotal, *saved)
    return dx, dx, dweight, None


_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_keep_total)

# --- the roles ---------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y [..., D] = x / sqrt(mean(x^2) + eps) * weight in x's dtype; x [..., D], weight [D].

    weight may have a dtype of its own; its gradient has it too. Raises ValueError if shapes or
    devices do not fit, for a dtype that the device does not take, and for D over LARGEST_WIDTH.
    """
    y: Tensor = _rms_norm(x, weight, eps)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, total): total = x + residual, rounded to their dtype, and y = rms_norm(total).

    x and residual [..., D] are alike. Raises ValueError if they are not, and as rms_norm does.
    """
    y, total, _ = _add_rms_norm(x, residual, weight, eps)
    return y, total


rms_norm.kernel_calls = launches_of("rms_norm_forward", "rms_norm_backward", "sum_of_parts")
add_rms_norm.kernel_calls = rms_norm.kernel_calls
