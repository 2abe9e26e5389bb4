"""y = x W^T + b and its gradients, as one tiled matrix product and a column sum.

y = x W^T + b, dx = dy W, dW = dy^T x, db = sum over rows of dy; see matrix.py.
"""

from typing import Any

import torch
from torch import Tensor

from candidates.tilelang.dialect import NAMESPACE, dense, dtype_name, launches_of
from candidates.tilelang.matrix import column_sum, product


@torch.library.custom_op(f"{NAMESPACE}::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = dense(x.reshape(-1, x.shape[-1]))
    bias = None if bias is None else dense(bias)
    y = product(rows, dense(weight), (False, True), (False, True, True), bias)
    return y.view(*x.shape[:-1], weight.shape[0])


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op(f"{NAMESPACE}::linear_backward", mutates_args=())
def _linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; empty where it is not needed."""
    dy_rows, x_rows = dense(dy.reshape(-1, dy.shape[-1])), dense(x.reshape(-1, x.shape[-1]))
    dx, dweight, dbias = (x.new_empty(0) for _ in range(3))
    if needed[0]:
        dx = product(dy_rows, dense(weight), (False, False), (False, True, True)).view(x.shape)
    if needed[1]:
        dweight = product(dy_rows, x_rows, (True, False), (True, True, False))
    if needed[2]:
        dbias = column_sum(dy_rows)
    return dx, dweight, dbias


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, needed: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    dx, dweight, dbias = (
        x.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, needed, strict=True)
    )
    return dx, dweight, dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad)
    gradients = _linear_backward(dy, *ctx.saved_tensors, needed)
    return tuple(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))


_linear.register_autograd(_differentiate, setup_context=_keep)


def require(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError if shapes, dtypes or devices do not fit or the device does not take the dtype."""
    dtype_name("linear", x)
    outputs = weight.shape[:1]
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1] or not min(weight.shape):
        raise ValueError(
            f"x must be [..., I] and weight [O, I] with I and O at least 1, got {list(x.shape)} "
            f"and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != outputs:
        raise ValueError(f"bias must be {list(outputs)}, got {list(bias.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype, other.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} must be {x.dtype} on {x.device} like x, got {other.dtype} on "
                f"{other.device}; cast it first"
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., O] = x weight^T + bias; x [..., I], weight [O, I], bias [O] or None, of one dtype.

    Raises ValueError if shapes, dtypes or devices do not fit, or the device does not take the
    dtype.
    """
    require(x, weight, bias)
    y: Tensor = _linear(x, weight, bias)
    return y


linear.kernel_calls = launches_of("matrix_product", "column_parts", "sum_of_parts")
