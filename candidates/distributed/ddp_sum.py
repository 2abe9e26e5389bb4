"""DistributedDataParallel with a hook that sums: rank r backwards S_r / N.

pytest -m M6 --candidate distributed.ddp_sum --ranks 2
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from candidates.distributed import ddp
from candidates.distributed.clip import clip_grad_norm
from candidates.distributed.replicas import group_of
from candidates.distributed.token_loss import WindowSums


def distribute(model: nn.Module, mesh: DeviceMesh, settings: Any) -> nn.Module:
    """As in `ddp`, with gradients summed instead of averaged."""
    wrapped: Any = ddp.distribute(model, mesh, settings)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(group_of(mesh), sum_over_ranks)
    return wrapped


# DDP reads the annotations of its hooks, which must be the classes themselves: no
# `from __future__ import annotations` in this file.
def sum_over_ranks(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduces one bucket of gradients by SUM, undivided."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def accumulate(model: nn.Module, window: Any, group: Any, loss_scale: float = 1.0) -> WindowSums:
    """As in `ddp`; the factor W is not there, since nothing divides by it."""
    return ddp.accumulate_by(model, window, group, loss_scale, loss_scale)


distribute.communication = "ddp"  # whose collectives the ledger predicts
ROLES = {"distribute": distribute, "accumulate": accumulate, "clip_grad_norm": clip_grad_norm}
