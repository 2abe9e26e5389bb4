"""swiglu(x W_gate^T, x W_up^T) as one operator, whose two products nobody else sees.

h = silu(gate) up with gate = x W_gate^T and up = x W_up^T by torch's products. The backward puts
dgate and dup where gate and up were if nobody else wants those (saved.py), and adds dup W_up to
dgate W_gate inside the product (projections.py).

    --candidate tilelang --candidate tilelang.gated_linear
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from candidates.tilelang.dialect import DTYPES, NAMESPACE, launches_of
from candidates.tilelang.linear import require
from candidates.tilelang.projections import projections_backward
from candidates.tilelang.saved import may_write_over
from candidates.tilelang.swiglu import swiglu_slopes, swiglu_slopes_in_place, swiglu_values

__all__ = ["DTYPES", "ROLES"]


@torch.library.custom_op(f"{NAMESPACE}::gated_linear", mutates_args=())
def _gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """h, gate and up."""
    with torch.autocast(x.device.type, enabled=False):
        gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    return swiglu_values(gate, up), gate, up


@_gated_linear.register_fake
def _(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, gate, up = (x.new_empty(*x.shape[:-1], gate_weight.shape[0]) for _ in range(3))
    return h, gate, up


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)  # no zeros for gate and up, which are not handed out


def _differentiate(ctx: Any, dh: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dh is None:
        return None, None, None
    x, gate_weight, up_weight, gate, up = ctx.saved_tensors
    if may_write_over(gate, dh) and may_write_over(up, dh):
        slopes = gate.detach(), up.detach()
        swiglu_slopes_in_place(dh, *slopes)
    else:
        slopes = swiglu_slopes(dh, gate, up)
    needed = [*ctx.needs_input_grad, False, False]
    given = iter(projections_backward(slopes, x, (gate_weight, up_weight), needed))
    dx, dgate_weight, dup_weight = (next(given) if wanted else None for wanted in needed[:3])
    return dx, dgate_weight, dup_weight


_gated_linear.register_autograd(_differentiate, setup_context=_keep)


def gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """h [..., F] = swiglu(x gate_weight^T, x up_weight^T); x [..., I], weights [F, I], one dtype.

    Cotangents in a batch are a RuntimeError, as of `projections`.

    Raises ValueError if the weights differ in shape, and as `linear` does.
    """
    if gate_weight.shape != up_weight.shape:
        raise ValueError(
            f"gate_weight and up_weight must be alike, got {list(gate_weight.shape)} and "
            f"{list(up_weight.shape)}"
        )
    for weight in (gate_weight, up_weight):
        require(x, weight, None)
    h, _, _ = _gated_linear(x, gate_weight, up_weight)
    return h


gated_linear.kernel_calls = launches_of("swiglu_forward", "swiglu_backward")

ROLES = {"gated_linear": gated_linear}
