"""A model on many ranks: what wrapping it means, and what it must keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

MESH_NAMES = (("data",), ("replicate", "shard"))
PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")  # the longer first


@dataclass(frozen=True)
class DistributionSettings:
    """How a distributed model computes.

    compute_dtype: of every operator, as the field of that name in the configuration; parameters,
    gradients and their sums stay float32. None: as the model was built. checkpoint_activations:
    keep the inputs of each layer alone and compute the rest again in the backward.
    """

    compute_dtype: torch.dtype | None = None
    checkpoint_activations: bool = False


def distribute(model: Any, mesh: Any, settings: DistributionSettings) -> nn.Module:
    """The model as all ranks of `mesh` train it together, with the values of the first rank.

    Parameters and buffers are those of the first rank, whatever seeds the others drew theirs with.
    Recomputed layers draw the random numbers of their first computation. Names stay those of
    `model`, but for PREFIXES that an implementation may put between their parts; a tied parameter
    stays one; `accumulate` and `clip_grad_norm` of the same stack take the result.

    This implementation changes `model` and returns it: every rank holds all of it.

    mesh: a DeviceMesh whose dimensions are named ("data",) or ("replicate", "shard").
    Raises ValueError for another mesh, and for settings that the model has no place for.
    """
    require_mesh(mesh)
    if settings.compute_dtype is not None:
        _compute_in(model, settings.compute_dtype)
    if settings.checkpoint_activations:
        recompute_layers(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            for dimension in range(mesh.ndim):  # down the first column, then along every row
                dist.broadcast(tensor, group=mesh.get_group(dimension), group_src=0)
    wrapped: nn.Module = model
    return wrapped


def require_mesh(mesh: Any) -> None:
    """Raises ValueError unless the dimensions of `mesh` are named as in MESH_NAMES."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names not in MESH_NAMES:
        raise ValueError(
            'the dimensions of a mesh must be named ("data",) or ("replicate", "shard"), got '
            f"{names!r} of {mesh!r}"
        )


def data_group(mesh: Any) -> Any:
    """The ProcessGroup of all ranks of `mesh`, which share every window.

    Raises ValueError for a mesh of two dimensions over a part of the ranks: it has no such group.
    """
    require_mesh(mesh)
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"a mesh of {mesh.ndim} dimensions must hold all {dist.get_world_size()} ranks, got "
            f"{mesh.size()}"
        )
    return dist.group.WORLD


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the model that was distributed, parameter), a tied one once."""
    for name, parameter in model.named_parameters():
        yield original_name(name), parameter


def original_name(name: str) -> str:
    """The name of a parameter or buffer without the PREFIXES that wrapping put into it."""
    wrappers = {prefix.removesuffix(".") for prefix in PREFIXES}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def recompute_layers(model: Any) -> None:
    """Has each of `model.layers` keep its inputs alone, and compute the rest again in the backward.

    With the random state of the first computation, so that the same is dropped. Raises ValueError
    for a model without `layers`.
    """
    if not hasattr(model, "layers"):
        raise ValueError(f"{type(model).__name__} has no `layers` to recompute")
    for layer in model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True
        )


def _compute_in(model: Any, dtype: torch.dtype) -> None:
    if not hasattr(model, "config") or not hasattr(model.config, "compute_dtype"):
        raise ValueError(f"{type(model).__name__} has no config.compute_dtype to set to {dtype}")
    model.config = replace(model.config, compute_dtype=dtype)
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype
