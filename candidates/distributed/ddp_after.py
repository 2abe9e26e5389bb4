"""DistributedDataParallel scaled at the end: rank r backwards S_r, then gradients times W / N.

    pytest -m M6 --candidate distributed.ddp_after --ranks 2

N need not be known before the first backward, so nothing is counted beforehand. Sums are larger
than means: with a loss scale in float16 the other two overflow later.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from candidates.distributed import token_loss
from candidates.distributed.clip import clip_grad_norm
from candidates.distributed.ddp import distribute, unsynchronized
from candidates.distributed.token_loss import WindowSums


def accumulate(model: nn.Module, window: Any, group: Any, loss_scale: float = 1.0) -> WindowSums:
    """As in `ddp`; counts, too, are summed over ranks after the last backward."""
    loss_model: Any = token_loss.wrapped(model, DistributedDataParallel, group)
    device = token_loss.device_of(model)
    model.zero_grad(set_to_none=True)
    nll_sum = token_loss.backward_all(loss_model, window, loss_scale, unsynchronized(loss_model))
    counts = [window.num_targets, window.num_tokens]
    num_targets, num_tokens = token_loss.sum_counts(counts, group, device)
    (nll_sum,) = token_loss.sum_floats([nll_sum], group, device)
    if num_targets:
        divisor = loss_scale * num_targets / token_loss.num_ranks(group)
        token_loss.divide(model.parameters(), divisor)
    else:
        model.zero_grad(set_to_none=True)
    return WindowSums(nll_sum, num_targets, num_tokens)


ROLES = {"distribute": distribute, "accumulate": accumulate, "clip_grad_norm": clip_grad_norm}
