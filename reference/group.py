"""What the ranks of a group tell each other: counts, sums, and gradients.

A group is None, one process, or a torch ProcessGroup. Every rank of it makes the same calls in the
same order, whatever its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def require_group(group: Any, what: str) -> None:
    """Raises ValueError unless group is None or a ProcessGroup that this process is a member of."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{what}: group must be None (one process) or a torch.distributed.ProcessGroup with "
            f"this process in it, got {group!r}"
        )


def rank_in(group: Any) -> tuple[int, int]:
    """(this process's rank in the group, number of ranks); (0, 1) for one process."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def sum_counts(counts: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """The sums of `counts` over all ranks, one int64 all-reduce; `device`: of the group's kind."""
    if group is None:
        return list(counts)
    totals = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=group)
    return [int(total) for total in totals.tolist()]


def sum_floats(value: float, group: Any, device: torch.device) -> float:
    """The sum of `value` over all ranks, in float64 and in rank order: equal bits on all of them.

    The bits travel as int64, because not every device has float64. Not finite stays not finite.
    """
    if group is None:
        return value
    bits = torch.tensor([value], dtype=torch.float64).view(torch.int64).to(device)
    parts = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, bits, group=group)
    return sum(float(part.cpu().view(torch.float64)) for part in parts)


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], group: Any) -> None:
    """Replaces every gradient by its sum over all ranks, taken in float32 or wider.

    One all-reduce a parameter, in the order given. A parameter without a gradient here takes part
    with zeros if any rank has one, and stays without if none has.
    """
    if group is None:
        return
    chosen = list(parameters)
    if not chosen:
        return
    has_gradient = [int(parameter.grad is not None) for parameter in chosen]
    num_having = sum_counts(has_gradient, group, chosen[0].device)
    for parameter, num_ranks in zip(chosen, num_having, strict=True):
        if num_ranks == 0:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        dist.all_reduce(wide, group=group)
        parameter.grad = wide.to(gradient.dtype)
