"""What an implementation makes of one batch: hidden states, logits, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gates import twins
from harness.devices import has_float64
from reference import ops
from reference.ops import arithmetic_dtype


@dataclass(frozen=True)
class Outcome:
    """Of one forward and backward pass, at tokens that are no padding; all on one device.

    layers: the output [M, D] of each layer; hidden [M, D]: after the final norm; logits [M, V];
    nll: of each `group` of targets, in nats; nll_of_hidden: the same from `hidden` by the formula,
    in float64; loss: the sum over the number of targets; gradients: of the loss, by the
    decoder's parameter names (empty if none were asked for); errors: what `settled` leaves of them.
    """

    layers: list[Tensor]
    hidden: Tensor
    logits: Tensor
    nll: Tensor
    nll_of_hidden: Tensor
    loss: float
    group: int
    gradients: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def place(device: torch.device) -> torch.device:
    """Where outcomes of a device are kept and compared: there if it has float64, else the CPU."""
    return device if has_float64(device.type) else torch.device("cpu")


def of_stack(
    stack: Any,
    model: nn.Module,
    batch: twins.Batch,
    *,
    gradients: bool,
    group: int = 1,
    kept_on: torch.device | str = "cpu",
) -> Outcome:
    """The model on trial: its hidden states, and the loss by `stack.token_nll`.

    The loss of each group of `group` targets is taken by itself as well, since an error of one
    token disappears in a mean. kept_on: the device of the outcome.
    """
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda layer, args, output: outputs.append(output.detach()))
        for layer in model.layers
    ]
    data = batch.microbatch
    with torch.set_grad_enabled(gradients):
        hidden_BTD = model(data.input_ids, data.positions, data.documents)
        head_VD = model.lm_head.weight
        nll_sum, num_targets = stack.token_nll(
            hidden_BTD.flatten(0, 1), head_VD, data.labels.flatten()
        )
    for handle in handles:
        handle.remove()
    real, targets = batch.real_BT, batch.is_target_BT
    with torch.no_grad():
        head = head_VD.to(hidden_BTD.dtype)
        logits_MV = stack.linear(hidden_BTD[real], head, None)
        parts = hidden_BTD[targets].split(group), data.labels[targets].split(group)
        nll = [stack.token_nll(hidden, head, labels)[0]
               for hidden, labels in zip(*parts, strict=True)]  # fmt: skip
        where = place(hidden_BTD.device)
        of_targets = (hidden_BTD[targets], head, data.labels[targets])
        formula = exact_nll(*(x.to(where) for x in of_targets))
    found = {}
    if gradients:
        model.zero_grad(set_to_none=True)
        (nll_sum / num_targets).backward()
        found = taken(model.named_parameters(), kept_on)
    return Outcome(
        layers=[output[real].to(kept_on) for output in outputs],
        hidden=hidden_BTD.detach()[real].to(kept_on),
        logits=logits_MV.to(kept_on),
        nll=torch.stack(nll).to(kept_on),
        nll_of_hidden=by_group(formula, group).to(kept_on),
        loss=float(nll_sum.detach() / num_targets),
        group=group,
        gradients=found,
    )


def of_twin(
    twin: nn.Module,
    batch: twins.Batch,
    *,
    gradients: bool,
    group: int = 1,
    kept_on: torch.device | str = "cpu",
) -> Outcome:
    """transformers' model: logits are cast to float32 before the loss, as its own loss does.

    The loss of those is taken in float64 where there is that: over 49152 logits torch's in float32
    is 2e-5 nats off on a CPU, always in one direction.
    """
    with torch.set_grad_enabled(gradients):
        layers, hidden_BTD, logits_BTV = twins.forward(twin, batch)
        targets, real = batch.is_target_BT, batch.real_BT
        wide = logits_BTV[targets].to(arithmetic_dtype(logits_BTV.dtype))
        if has_float64(wide.device.type):
            wide = wide.double()
        nll = F.cross_entropy(wide, batch.microbatch.labels[targets], reduction="none")
    found = {}
    if gradients:
        twin.zero_grad(set_to_none=True)
        nll.mean().backward()
        named = ((n.removeprefix("model."), p) for n, p in twin.named_parameters())
        found = taken(named, kept_on)
    nll = nll.detach()
    nll_by_group = by_group(nll, group).to(kept_on)
    return Outcome(
        layers=[layer.detach()[real].to(kept_on) for layer in layers],
        hidden=hidden_BTD.detach()[real].to(kept_on),
        logits=logits_BTV.detach()[real].to(kept_on),
        nll=nll_by_group,
        nll_of_hidden=nll_by_group,
        loss=float(nll.mean()),
        group=group,
        gradients=found,
    )


def exact_nll(hidden_MD: Tensor, head_VD: Tensor, labels_M: Tensor) -> Tensor:
    """-log softmax(hidden head^T) of the labels, [M], in float64."""
    logits_MV = hidden_MD.double() @ head_VD.double().T
    return F.cross_entropy(logits_MV, labels_M, reduction="none")


def by_group(nll_M: Tensor, group: int) -> Tensor:
    """The sum of each `group` of targets."""
    return torch.stack([piece.sum() for piece in nll_M.split(group)])


def taken(
    parameters: Iterable[tuple[str, nn.Parameter]], kept_on: torch.device | str
) -> dict[str, Tensor]:
    """The gradients, and no longer the parameters'; zeros where there is none."""
    found = {}
    for name, parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
        found[name] = gradient.detach().to(kept_on)
    return found


def recording(stack: Any, role: str, calls: list[tuple[Any, ...]]) -> Any:
    """The stack, in which every call of `role` leaves its arguments and its result in `calls`."""

    def noting(*arguments: Any) -> Any:
        result = getattr(stack, role)(*arguments)
        kept = (x.detach().cpu() if isinstance(x, Tensor) else x for x in (*arguments, result))
        calls.append(tuple(kept))
        return result

    return stack.replace({role: noting})


def recording_norms(stack: Any, calls: list[tuple[Any, ...]]) -> Any:
    """The stack, in which every norm leaves (x, gain, epsilon, y) in `calls`.

    x of a norm that adds the residual is the sum that it returns. The model calls such a norm
    where the stack has its own.
    """
    recorder = recording(stack, "rms_norm", calls)
    if stack.add_rms_norm is ops.add_rms_norm:
        return recorder

    def noting(x: Tensor, residual: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        y, total = stack.add_rms_norm(x, residual, gain, epsilon)
        calls.append((total.detach().cpu(), gain.detach().cpu(), epsilon, y.detach().cpu()))
        return y, total

    return recorder.replace({"add_rms_norm": noting})
