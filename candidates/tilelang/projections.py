"""Linear layers of one input by torch's products, each of which adds to the dx of those before it.

y_i = x W_i^T + b_i; dx = sum_i dy_i W_i, dW_i = dy_i^T x, and db_i by TileLang's column sum. Added
up by autograd, dx would be read twice and written once more for every product but the first.

    --candidate tilelang --candidate tilelang.projections
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from candidates.tilelang.dialect import DTYPES, NAMESPACE, dense
from candidates.tilelang.linear import require
from candidates.tilelang.matrix import column_sum

__all__ = ["DTYPES", "ROLES"]


@torch.library.custom_op(f"{NAMESPACE}::projections", mutates_args=())
def _projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Every y_i. No biases, or one for each weight."""
    layers = zip(weights, biases or [None] * len(weights), strict=True)
    with torch.autocast(x.device.type, enabled=False):
        return [F.linear(x, weight, bias) for weight, bias in layers]


@_projections.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@torch.library.custom_op(f"{NAMESPACE}::projections_backward", mutates_args=())
def projections_backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needed: list[bool]
) -> list[Tensor]:
    """Those that are needed of dx, every dW_i and every db_i, in this order."""
    x_rows, dy_rows = x.reshape(-1, x.shape[-1]), [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    num_weights, gradients = len(weights), []
    with torch.autocast(x.device.type, enabled=False):
        if needed[0]:
            dx = dy_rows[0] @ weights[0]
            for dy, weight in zip(dy_rows[1:], weights[1:], strict=True):
                torch.addmm(dx, dy, weight, out=dx)
            gradients.append(dx.view(x.shape))
        gradients += [dy.T @ x_rows for dy in compress(dy_rows, needed[1 : 1 + num_weights])]
    return gradients + [
        column_sum(dense(dy)) for dy in compress(dy_rows, needed[1 + num_weights :])
    ]


@projections_backward.register_fake
def _(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needed: list[bool]
) -> list[Tensor]:
    shapes = [x.shape, *(w.shape for w in weights), *(w.shape[:1] for w in weights)]
    return [x.new_empty(shape) for shape in compress(shapes, needed)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _differentiate(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_x, of_weights, of_biases = ctx.needs_input_grad
    given = iter(projections_backward(dys, x, weights, [of_x, *of_weights, *of_biases]))
    dx = next(given) if of_x else None
    dweights, dbiases = (
        [next(given) if wanted else None for wanted in several]
        for several in (of_weights, of_biases)
    )
    return dx, dweights, dbiases


_projections.register_autograd(_differentiate, setup_context=_keep)


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """y_i [..., O_i] = x weight_i^T + bias_i; x [..., I], weight_i [O_i, I], bias_i [O_i] or None.

    All of one dtype. The backward is deterministic; cotangents in a batch (`is_grads_batched`) are
    a RuntimeError, since torch has no rule for an operator that returns a list.

    Raises ValueError if there is not one bias, or None, for each of one or more weights, and as
    `linear` does.
    """
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"there must be one bias or None for each of one or more weights, got {len(weights)} "
            f"weights and {len(biases)} biases"
        )
    for weight, bias in zip(weights, biases, strict=True):
        require(x, weight, bias)
    if all(bias is None for bias in biases):
        return tuple(_projections(x, weights, []))
    zeros = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return tuple(_projections(x, weights, zeros))


ROLES = {"projections": projections}
