"""fully_shard of every layer and of the rest: parameters, gradients and moments over the ranks.

    pytest -m M6 --candidate distributed.fsdp2 --ranks 2

Gradients are summed, not averaged: rank r backwards S_r / N.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from candidates.distributed import token_loss
from candidates.distributed.clip import clip_grad_norm
from candidates.distributed.replicas import (
    broadcast_first_rank,
    compute_in,
    group_of,
    recompute_layers,
)
from candidates.distributed.token_loss import TokenLoss, WindowSums


def distribute(model: nn.Module, mesh: DeviceMesh, settings: Any) -> nn.Module:
    """TokenLoss(model), sharded by rows over a 1-D mesh, or over the second dimension of a 2-D one.

    Each layer of `model.layers` is gathered by itself. Embedding, last norm and head stay in one
    unit, the root, so that a tied table stays one parameter. On a 2-D mesh ("replicate", "shard")
    the first dimension holds replicas.

    settings.compute_dtype: the dtype in which parameters are gathered and used, None for their own;
    gradients are reduced in float32 or wider. settings.checkpoint_activations: recompute every
    layer in the backward.
    """
    broadcast_first_rank(model, group_of(mesh))
    compute_in(model, settings.compute_dtype)
    if settings.checkpoint_activations:
        recompute_layers(model)
    own = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=settings.compute_dtype, reduce_dtype=torch.promote_types(own, torch.float32)
    )
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(TokenLoss(model), mesh=mesh, mp_policy=policy)
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    return root


def accumulate(model: nn.Module, window: Any, group: Any, loss_scale: float = 1.0) -> WindowSums:
    """Leaves in every `.grad`, on all ranks, its shard of the gradient of the window's token mean.

    window: this rank's microbatches, as many as on every other rank. N is known before the first
    backward. loss_scale multiplies the loss and is divided out of the gradients at the end.
    Gradients of all microbatches but the last are kept whole, in float32, and reduced once.
    Without a target on any rank no gradient is left. Returns the sums over all ranks.
    """
    loss_model: Any = token_loss.wrapped(model, FSDPModule, group)
    return token_loss.accumulate(
        loss_model, window, group, loss_scale, loss_scale, _unsynchronized(loss_model)
    )


def _unsynchronized(model: Any) -> Any:
    return _no_reduction(model) if isinstance(model, FSDPModule) else nullcontext()


@contextmanager
def _no_reduction(model: FSDPModule) -> Iterator[None]:
    """Backwards in here keep their gradients; the next one after it reduces them all."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)


distribute.communication = "fsdp2"  # whose collectives the ledger predicts
ROLES = {"distribute": distribute, "accumulate": accumulate, "clip_grad_norm": clip_grad_norm}
