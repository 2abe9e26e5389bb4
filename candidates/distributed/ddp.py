"""DistributedDataParallel, which averages: rank r backwards W * S_r / N.

    pytest -m M6 --candidate distributed.ddp --ranks 2

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from candidates.distributed import token_loss
from candidates.distributed.clip import clip_grad_norm
from candidates.distributed.replicas import (
    broadcast_first_rank,
    compute_in,
    group_of,
    recompute_layers,
)
from candidates.distributed.token_loss import TokenLoss, WindowSums

# Buffers do not change in training. The option that says so was renamed in torch 2.13.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


def distribute(model: nn.Module, mesh: DeviceMesh, settings: Any) -> nn.Module:
    """DDP around TokenLoss(model), all ranks of the mesh being replicas.

    settings.compute_dtype: what the model casts parameters to where it uses them.
    settings.checkpoint_activations: recompute every layer in the backward.
    """
    group = group_of(mesh)
    broadcast_first_rank(model, group)
    compute_in(model, settings.compute_dtype)
    if settings.checkpoint_activations:
        recompute_layers(model)
    return DistributedDataParallel(
        TokenLoss(model),
        process_group=group,
        init_sync=False,
        gradient_as_bucket_view=True,
        **{NO_BUFFERS: False},
    )


def accumulate(model: nn.Module, window: Any, group: Any, loss_scale: float = 1.0) -> WindowSums:
    """Leaves in every `.grad`, on all ranks, the gradient of the window's token mean.

    window: this rank's microbatches, as many as on every other rank. N is known before the first
    backward. loss_scale multiplies the loss and is divided out of the gradients at the end.
    Without a target on any rank no gradient is left. Returns the sums over all ranks.
    """
    factor = loss_scale * token_loss.num_ranks(group)
    return accumulate_by(model, window, group, factor, loss_scale)


def accumulate_by(
    model: nn.Module, window: Any, group: Any, factor: float, loss_scale: float
) -> WindowSums:
    """Backwards factor * S_r / N on every rank, then divides by loss_scale."""
    loss_model: Any = token_loss.wrapped(model, DistributedDataParallel, group)
    return token_loss.accumulate(
        loss_model, window, group, factor, loss_scale, unsynchronized(loss_model)
    )


def unsynchronized(model: Any) -> Any:
    """A context in which DDP keeps gradients to itself; none is needed without DDP."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


distribute.communication = "ddp"  # whose collectives the ledger predicts
ROLES = {"distribute": distribute, "accumulate": accumulate, "clip_grad_norm": clip_grad_norm}
