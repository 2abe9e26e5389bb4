"""The loss inside the wrapped forward, and the sums of a window over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class WindowSums:
    """Of one window over all ranks: summed loss in nats, targets, positions read."""

    nll_sum: float
    num_targets: int
    num_tokens: int


class TokenLoss(nn.Module):
    """Microbatch to summed loss, in one forward.

    DDP and FSDP2 act in the forward of the module that they wrap. The head's weight is used in the
    loss, so the loss is computed inside. `module` is the model: names get the prefix `module.`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, input_ids_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None,
        labels_BT: Tensor,
    ) -> Tensor:  # fmt: skip
        """nll_sum in nats, a scalar; 0 with a gradient of zeros where there is no target."""
        model: Any = self.module
        hidden_BTD = model(input_ids_BT, positions_BT, documents_BT)
        nll_sum: Tensor = model.stack.token_nll(
            hidden_BTD.flatten(0, 1), model.lm_head.weight, labels_BT.flatten()
        )[0]
        return nll_sum


def loss_of(model: nn.Module, microbatch: Any) -> Tensor:
    """The summed loss of one microbatch by a (wrapped) TokenLoss."""
    nll_sum: Tensor = model(
        microbatch.input_ids, microbatch.positions, microbatch.documents, microbatch.labels
    )
    return nll_sum


def backward_all(
    model: nn.Module, window: Any, factor: float, unsynchronized: AbstractContextManager[Any]
) -> float:
    """Backwards nll_sum * factor of every microbatch; returns this rank's summed loss.

    A rank without a target goes through the same passes, since the others wait for it.
    unsynchronized: around all microbatches but the last, and around forward and backward both:
    DDP arms its reducer in forward.
    """
    first, last = window.microbatches[:-1], window.microbatches[-1]
    with unsynchronized:
        nll_sums = [_backward(model, microbatch, factor) for microbatch in first]
    nll_sums.append(_backward(model, last, factor))
    # One wait for the device, and float64 on the CPU: not every device has it.
    return float(torch.stack(nll_sums).cpu().double().sum())


def accumulate(
    loss_model: nn.Module,
    window: Any,
    group: Any,
    factor: float,
    loss_scale: float,
    unsynchronized: AbstractContextManager[Any],
) -> WindowSums:
    """Backwards factor * S_r / N on every rank, then divides the gradients by loss_scale.

    N, the targets of all ranks, is known before the first backward; without one no gradient is
    left. loss_model: from `wrapped`. unsynchronized: as in `backward_all`. Returns the sums over
    all ranks.
    """
    device = device_of(loss_model)
    num_targets, num_tokens = sum_counts([window.num_targets, window.num_tokens], group, device)
    loss_model.zero_grad(set_to_none=True)
    nll_sum = 0.0
    if num_targets:
        nll_sum = backward_all(loss_model, window, factor / num_targets, unsynchronized)
        divide(loss_model.parameters(), loss_scale)
    (nll_sum,) = sum_floats([nll_sum], group, device)
    return WindowSums(nll_sum, num_targets, num_tokens)


def _backward(model: nn.Module, microbatch: Any, factor: float) -> Tensor:
    nll_sum = loss_of(model, microbatch)
    (nll_sum * factor).backward()
    return nll_sum.detach().clone()  # an operator may use its output's memory again


def sum_counts(counts: list[int], group: Any, device: torch.device) -> list[int]:
    """Each count summed over the ranks of `group` in one collective; itself for None."""
    if group is None:
        return counts
    totals = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=group)
    return [int(total) for total in totals.tolist()]


def sum_floats(values: list[float], group: Any, device: torch.device) -> list[float]:
    """Each value summed in float64 over the ranks of `group`, in rank order, in one collective.

    They travel as the bits of int64, since not every device has float64.
    """
    if group is None:
        return values
    bits = torch.tensor(values, dtype=torch.float64).view(torch.int64).to(device)
    parts = [torch.empty_like(bits) for _ in range(num_ranks(group))]
    dist.all_gather(parts, bits, group=group)
    total = sum((part.cpu().view(torch.float64) for part in parts), torch.zeros(len(values)))
    return [float(value) for value in total.tolist()]


def num_ranks(group: Any) -> int:
    """W: the size of the group, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def wrapped(model: nn.Module, wrapper: type, group: Any) -> nn.Module:
    """The distributed model, or a plain one with its loss, as one process trains it.

    Raises ValueError for a plain model on several ranks and for a distributed one without a group.
    """
    if isinstance(model, wrapper):
        if group is None:
            raise ValueError("a distributed model needs the group of its ranks, got None")
        return model
    if num_ranks(group) > 1:
        raise ValueError(
            f"accumulate over {num_ranks(group)} ranks needs a model from distribute (a "
            f"{wrapper.__name__}), got {type(model).__name__}"
        )
    return TokenLoss(model)


def divide(parameters: Iterable[Tensor], divisor: float) -> None:
    """Divides every gradient in place; a divisor of 1 leaves them bit for bit."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and divisor != 1:
        torch._foreach_div_(gradients, divisor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters are."""
    return next(model.parameters()).device
