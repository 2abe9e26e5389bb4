"""The last layer and the cross-entropy as one operator: the logits never exist at once.

The loss and its gradients are computed in the forward, chunk by chunk of rows
(token_nll_chunks.py); the backward multiplies the gradients by the cotangent of the sum.
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
    line_of,
)
from candidates.tilelang.saved import may_write_over
from candidates.tilelang.token_nll_chunks import loss_and_gradients
from candidates.tilelang.token_nll_kernels import scaled
from candidates.tilelang.token_nll_labels import NO_TARGET, LabelCheck


@torch.library.custom_op(f"{NAMESPACE}::token_nll", mutates_args=())
def _token_nll(
    hidden: Tensor, weight: Tensor, labels: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """nll_sum, num_tokens, and the gradients of nll_sum; empty where not needed."""
    labels, dtype = dense(labels), dtype_name("token_nll", hidden)
    check = LabelCheck(labels, weight.shape[0])
    with torch.autocast(labels.device.type, enabled=False):  # its products are of its own dtypes
        nll, dhidden, dweight = loss_and_gradients(
            dense(hidden), dense(weight), labels, dtype, (needed[0], needed[1])
        )
    check.raise_if_wrong()
    nll_sum = nll.sum(dtype=torch.float64).to(torch.float32)
    return nll_sum, (labels != NO_TARGET).sum(), dhidden, dweight


@_token_nll.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nll_sum = hidden.new_empty((), dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if needed[0] else (0,))
    dweight = weight.new_empty(weight.shape if needed[1] else (0,))
    return nll_sum, labels.new_empty((), dtype=torch.int64), dhidden, dweight


def _scale(x: Tensor, factor: Tensor, y: Tensor) -> None:
    line = line_of(x)
    if x.numel():
        lines = x.view(-1, line), dense(factor).view(1), y.view(-1, line)
        launch(scaled, dialect_of(x), (line, dtype_name("token_nll", x)), *lines)


@torch.library.custom_op(f"{NAMESPACE}::scaled", mutates_args=())
def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor; the factor, a float32 scalar, is not rounded to x's dtype."""
    y = x.new_empty(x.shape)
    _scale(dense(x), factor, y)
    return y


@_scaled.register_fake
def _(x: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(f"{NAMESPACE}::scale_", mutates_args=("x",))
def _scale_in_place(x: Tensor, factor: Tensor) -> None:
    """The same, and x takes the result."""
    _scale(x, factor, x)


@_scale_in_place.register_fake
def _(x: Tensor, factor: Tensor) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], output[3])
    ctx.needed = inputs[3]
    ctx.set_materialize_grads(False)  # no zeros, as large as the gradients, for them


def _differentiate(ctx: Any, factor: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if factor is None:
        return None, None, None, None
    gradients = (
        _multiplied(gradient, factor) if wanted else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.needed, strict=True)
    )
    return *gradients, None, None


def _multiplied(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor, in its own memory if it may be."""
    if not may_write_over(gradient, factor):
        return _scaled(gradient, factor)
    gradient = gradient.detach()
    _scale_in_place(gradient, factor)
    return gradient


_token_nll.register_autograd(_differentiate, setup_context=_keep)


def _require(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    dtype_name("token_nll", hidden)
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"hidden must be [M, D] and labels [M] int64, got {list(hidden.shape)} and "
            f"{labels.dtype} {list(labels.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1] or not min(weight.shape):
        raise ValueError(
            f"weight must be [V, {hidden.shape[1]}] with V and D at least 1, got "
            f"{list(weight.shape)}"
        )
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden, weight and labels must be on one device, got {hidden.device}, "
            f"{weight.device} and {labels.device}"
        )


def token_nll(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over m with a target of -log softmax(hidden_m weight^T)[labels_m], and their number.

    hidden [M, D], weight [V, D], rounded to hidden's dtype, labels [M] int64, -100 for no target.
    Returns (nll_sum in nats, float32; num_tokens, int64), scalar tensors.

    The gradients are computed here, while the logits of a chunk are at hand, and the backward
    multiplies them by the cotangent. A chunk takes 400 to 640 MiB, and more where there would
    be more than 26 of them: the gradient of weight is added up over the chunks in its own dtype,
    for frequent labels in float32. The labels are checked on the device and the host waits for the
    answer.

    Raises ValueError on shapes, dtypes or devices that do not fit, and for a label outside [0, V)
    that is not -100.
    """
    _require(hidden, weight, labels)
    weight = weight.to(hidden.dtype)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    nll_sum, num_tokens, _, _ = _token_nll(hidden, weight, labels, needed)
    return nll_sum, num_tokens


token_nll.kernel_calls = launches_of(
    "logit_tiles", "logit_gradients", "with_label", "with_rows_of_labels", "scaled"
)
