"""What every rank does in the M6 gates: the programs of `ranks.run`."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gates import outcomes, toys
from gates.distributed import (
    Clip,
    Communicated,
    Gradient,
    Look,
    Shares,
    Spread,
    Start,
    Trained,
    Updates,
    digest,
    targeted_rows,
    whole,
    whole_parameters,
)
from reference.distribute import named_parameters
from reference.schedule import Schedule
from reference.update import NonFiniteError, TrainState, UpdateSettings
from reference.window import Window

TIED_NAMES = ("embed_tokens.weight", "lm_head.weight")


def mesh_of(rank: Any, shape: tuple[int, ...] | None = None) -> Any:
    """The DeviceMesh of all ranks: ("data",), or ("replicate", "shard") for a shape of two."""
    shape = shape or (rank.world_size,)
    names = ("data",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh(rank.device.type, shape, mesh_dim_names=names)


def plain_model(rank: Any, stack: Any, start: Start) -> nn.Module:
    """The model of a start before it is distributed."""
    if start.toy is not None:
        model: nn.Module = copy.deepcopy(start.toy)
    else:
        inside = dropping(stack) if start.dropout else stack
        model = stack.build_model(replace(toys.TINY, **start.changes), inside).to(start.dtype)
        model.load_state_dict(start.values)
    if start.strangers and rank.index:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank.index)
    return model.to(rank.device)


def dropping(stack: Any) -> Any:
    """The stack with a fifth of what attention returns dropped, from the global generator."""
    return stack.replace({"attention": lambda *given: F.dropout(stack.attention(*given), 0.2)})


def distributed(rank: Any, stack: Any, start: Start) -> nn.Module:
    """The model of a start, distributed over all ranks."""
    mesh = mesh_of(rank, start.mesh_shape)
    model: nn.Module = stack.distribute(plain_model(rank, stack, start), mesh, start.settings)
    return model


def gradient_of(rank: Any, stack: Any, model: nn.Module, share: Window, scale: float) -> Gradient:
    """One accumulate over all ranks, and what it left."""
    stats = stack.accumulate(model, share.to(rank.device), rank.group, scale)
    tensors = {}
    for name, parameter in named_parameters(model):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        tensors[name] = whole(gradient)
    return Gradient(stats.nll_sum, stats.num_targets, stats.num_tokens, tensors)


def accumulated(
    rank: Any, stack: Any, start: Start, cases: dict[str, Shares], scale: float = 1.0
) -> dict[str, Gradient]:
    """What one model's accumulate leaves of every case, one after the other."""
    model = distributed(rank, stack, start)
    return {
        name: gradient_of(rank, stack, model, shares[rank.index], scale)
        for name, shares in cases.items()
    }


def accumulated_by_each(
    rank: Any, stack: Any, starts: dict[str, Start], shares: Shares
) -> dict[str, Gradient]:
    """What accumulate leaves of one window in a model of every start, with one random state."""
    found = {}
    for name, start in starts.items():
        calls: list[Any] = []
        watched = outcomes.recording(stack, "attention", calls)
        model = distributed(rank, watched, start)
        torch.manual_seed(rank.index)
        gradient = gradient_of(rank, watched, model, shares[rank.index], 1.0)
        found[name] = replace(gradient, num_attentions=len(calls))
    return found


def accumulated_beside_ddp(
    rank: Any, stack: Any, start: Start, shares: Shares
) -> dict[str, Gradient]:
    """What accumulate leaves, and what torch's DDP leaves in the plain model without the roles."""
    model = distributed(rank, stack, start)
    ours = gradient_of(rank, stack, model, shares[rank.index], 1.0)
    return {"roles": ours, "ddp": _ddp_gradient(rank, stack, start, shares)}


def _ddp_gradient(rank: Any, stack: Any, start: Start, shares: Shares) -> Gradient:
    model: Any = plain_model(rank, stack, start)
    share = shares[rank.index].to(rank.device)
    num_targets = sum(window.num_targets for window in shares)
    wrapped = DistributedDataParallel(_Loss(model))
    for index, microbatch in enumerate(share.microbatches):
        wrapped.require_backward_grad_sync = index == len(share.microbatches) - 1
        (wrapped(microbatch) * (rank.world_size / num_targets)).backward()
    return Gradient(float("nan"), num_targets, 0, toys.gradients(model))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, microbatch: Any) -> Tensor:
        model = self.model
        hidden_BTD = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
        labels_M = microbatch.labels.flatten()
        nll: Tensor = model.stack.token_nll(
            hidden_BTD.flatten(0, 1), model.lm_head.weight, labels_M
        )[0]
        return nll


def updated(
    rank: Any, stack: Any, start: Start, windows: Sequence[Shares], settings: UpdateSettings
) -> Updates:
    """Applies the windows one after the other with update_window."""
    model = distributed(rank, stack, start)
    groups = stack.param_groups(model, settings.weight_decay)
    training = TrainState(model, groups, group=rank.group)
    records, digests, stopped = [], [], ""
    for shares in windows:
        share = shares[rank.index].to(rank.device)
        try:
            records.append(stack.update_window(training, share, stack, settings))
        except NonFiniteError as error:
            stopped = str(error)
        digests.append(digest(whole_parameters(model)))
        if stopped:
            break
    return Updates(records, digests, whole_parameters(model), stopped)


def looked_at(rank: Any, stack: Any, start: Start, shares: Shares) -> dict[str, Look]:
    """The parameters before and after one update."""
    model = distributed(rank, stack, start)
    groups = stack.param_groups(model, 0.1)
    before = _look(model, groups)
    training = TrainState(model, groups, group=rank.group)
    share = shares[rank.index].to(rank.device)
    stack.update_window(training, share, stack, UpdateSettings(Schedule(1e-2, 1000)))
    return {"before": before, "after": _look(model, groups)}


def _look(model: nn.Module, groups: Sequence[dict[str, Any]]) -> Look:
    parameters = whole_parameters(model)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    ends = {end: p for name, p in by_name.items() for end in TIED_NAMES if name.endswith(end)}
    return Look(
        shapes={name: list(parameter.shape) for name, parameter in parameters.items()},
        digest=digest(parameters),
        is_tied=ends[TIED_NAMES[0]] is ends[TIED_NAMES[1]],
        num_in_groups=sum(len(group["params"]) for group in groups),
    )


def updated_by_each(
    rank: Any, stack: Any, plans: dict[str, tuple[Start, Sequence[Shares], UpdateSettings]]
) -> dict[str, Updates]:
    """`updated` of several plans, one after the other."""
    return {name: updated(rank, stack, *plan) for name, plan in plans.items()}


def clipped(
    rank: Any, stack: Any, gradients: Sequence[Spread], limits: Sequence[float], norm_type: float
) -> list[Clip]:
    """Clips these gradients, spread over the ranks anew for each limit."""
    clips = []
    for limit in limits:
        parameters = [spread_parameter(rank, gradient) for gradient in gradients]
        norm = float(stack.clip_grad_norm(parameters, limit, rank.group, norm_type))
        clips.append(Clip(norm, [whole(parameter.grad) for parameter in parameters]))
    return clips


def spread_parameter(rank: Any, gradient: Spread) -> nn.Parameter:
    """A parameter of zeros whose gradient is spread over the ranks as it says."""
    values = gradient.values.to(rank.device)
    if gradient.kind != "plain":
        half = 2 if rank.world_size == 4 else rank.world_size
        mesh_shape, placements = {
            "sharded": (None, [Shard(0)]),
            "replicated": (None, [Replicate()]),
            "replicas of shards": ((rank.world_size // half, half), [Replicate(), Shard(0)]),
            "sharded twice": ((rank.world_size // half, half), [Shard(0), Shard(1)]),
        }[gradient.kind]
        values = distribute_tensor(
            values, mesh_of(rank, mesh_shape), placements, src_data_rank=None
        )
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values
    return parameter


def communicated(
    rank: Any, stack: Any, starts: dict[str, Start], shares: Shares
) -> dict[str, Communicated]:
    """The collectives of the third update of every start: by then wrappers have settled."""
    found = {}
    for name, start in starts.items():
        model = distributed(rank, stack, start)
        training = TrainState(model, stack.param_groups(model, 0.1), group=rank.group)
        share = shares[rank.index].to(rank.device)
        settings = UpdateSettings(Schedule(1e-3, 1000))
        for _ in range(3):
            rank.collectives.reset()
            stack.update_window(training, share, stack, settings)
        seen = rank.collectives
        found[name] = Communicated(seen.counts, seen.num_bytes, list(seen.issued))
    return found


def trained(
    rank: Any,
    stack: Any,
    config: Any,
    windows: Sequence[Window],
    settings: UpdateSettings,
    total_tokens: int | None,
    last_window: str,
) -> Trained:
    """A whole run over all ranks, and the rows that this one read."""
    rows: list[list[str]] = []

    def accumulate(model: Any, window: Window, *arguments: Any) -> Any:
        rows.append(targeted_rows(window))
        return stack.accumulate(model, window, *arguments)

    watched = stack.replace({"accumulate": accumulate})
    result = stack.train(
        config, watched, windows, settings, 0, rank.device, total_tokens, last_window, False,
        None, mesh_of(rank),
    )  # fmt: skip
    return Trained(result.records, whole_parameters(result.model), rows)


def killed(rank: Any, stack: Any, start: Start, shares: Shares) -> None:
    """Two accumulates. In the second one's forward the last rank kills itself without a word."""
    model = distributed(rank, stack, start)
    share = shares[rank.index].to(rank.device)
    stack.accumulate(model, share, rank.group)  # whatever is slow once is behind everybody

    def die(*_: Any) -> None:
        time.sleep(0.5)  # the others would be through by now, if they did not wait
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.index == rank.world_size - 1:
        next(iter(model.modules())).register_forward_pre_hook(die)
    stack.accumulate(model, share, rank.group)
