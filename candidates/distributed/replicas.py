"""What every wrapper does to a model first: the same values everywhere, layers recomputed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of a mesh.

    Raises ValueError for a mesh of more than two dimensions, and for one of two that leaves ranks
    of the job out.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim != 2 or mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh must be 1-D, or 2-D over all {dist.get_world_size()} ranks, got shape "
            f"{tuple(mesh.shape)}"
        )
    return dist.group.WORLD


@torch.no_grad()
def broadcast_first_rank(model: nn.Module, group: Any) -> None:
    """Parameters and buffers of the group's first rank to all: ranks may start from other seeds."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def compute_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Has every module with a `compute_dtype` cast to `dtype` where it computes; None: as it is.

    Raises ValueError for a dtype that no module has a place for.
    """
    if dtype is None:
        return
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "compute_dtype")]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no compute_dtype to set to {dtype}")
    for module in modules:
        module.compute_dtype = dtype


def recompute_layers(model: nn.Module) -> None:
    """Puts activation checkpointing around every layer of `model.layers`.

    A layer's activations are computed again in the backward, with torch's random state as it was,
    so that dropout drops the same. Raises ValueError for a model without `layers`.
    """
    layers: Any = getattr(model, "layers", None)
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no `layers` to recompute")
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, preserve_rng_state=True)
