"""The norm of a gradient that is spread over ranks, and one factor for all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from candidates.distributed.token_loss import local


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, group: Any, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients by min(1, max_norm / norm); returns the norm before, on every rank.

    norm = (sum over all elements of |g|^p)^(1/p), p = norm_type, or max |g| for inf, in float32 or
    wider. An element counts once: shards are summed over the mesh dimensions that shard them,
    and no other; a plain tensor is the same on all ranks. Gradients may stand on different meshes.
    A norm that is not finite is returned and the gradients are left. Parameters without a gradient
    do not count.

    group: not used, the meshes of the gradients say who holds what. Raises ValueError for
    max_norm <= 0, norm_type <= 0, and for gradients that are partial sums.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"max_norm and norm_type must be > 0, got {max_norm} and {norm_type}")
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    wide = reduce(torch.promote_types, (g.dtype for g in gradients), torch.float32)
    places = _by_place(gradients).items()
    pieces = [_total(parts, place, norm_type, wide) for place, parts in places]
    norm = _joined(torch.stack(pieces), norm_type)
    if math.isfinite(norm_type):
        norm = norm ** (1 / norm_type)
    # min(1, nan) is nan: the factor must be 1 for a norm that is not finite.
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


Place = tuple[DeviceMesh, tuple[int, ...]] | None  # mesh and its dimensions that shard


def _by_place(gradients: list[Tensor]) -> dict[Place, list[Tensor]]:
    """The local parts by who holds the rest of them, in the same order on every rank."""
    places: dict[Place, list[Tensor]] = {}
    for gradient in gradients:
        places.setdefault(_place(gradient), []).append(local(gradient))
    return places


def _place(gradient: Tensor) -> Place:
    if not isinstance(gradient, DTensor):
        return None
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is a partial sum ({gradient.placements}); reduce it first")
    shards = [dim for dim, where in enumerate(gradient.placements) if not where.is_replicate()]
    return (gradient.device_mesh, tuple(shards)) if shards else None


def _total(parts: list[Tensor], place: Place, norm_type: float, wide: torch.dtype) -> Tensor:
    """sum |g|^p (or max |g|) of these parts over the ranks that hold the rest of them."""
    filled = [part for part in parts if part.numel()]  # a rank may hold nothing of a small one
    total = torch.zeros((), dtype=wide, device=parts[0].device)
    if filled:
        norms = torch.stack(torch._foreach_norm(filled, norm_type, dtype=wide))
        total = _joined(norms if math.isinf(norm_type) else norms**norm_type, norm_type)
    if place is not None:
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        mesh, dims = place
        for dim in dims:
            dist.all_reduce(total, operation, group=mesh.get_group(dim))
    return total


def _joined(values: Tensor, norm_type: float) -> Tensor:
    return values.amax() if math.isinf(norm_type) else values.sum()
