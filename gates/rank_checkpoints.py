"""What every rank does in the gates of checkpoints over ranks, and what that is held against."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gates import snapshots, toys
from gates.distributed import whole
from gates.rank_programs import mesh_of
from reference.checkpoint import capture, disk, expected, latest, restore
from reference.config import DecoderConfig
from reference.optimizer import AdamState
from reference.update import Counters, TrainState

POSITION = {"epoch": 1, "window": 2}
IDENTITY = {"tokenizer": "b" * 64}
DEADLINE_S = 1.0
# 6 rows over 4 ranks are 2, 2, 2 and none; 11, 5 and 3 do not divide either.
UNEVEN = {"model_width": 6, "feed_forward_width": 5, "num_layers": 1, "head_width": 6}
PLACEMENTS = {
    "sharded": (None, [Shard(0)]),
    "replicated": (None, [Replicate()]),
    "replicas of shards": ((2, 2), [Replicate(), Shard(0)]),
    "sharded twice": ((2, 2), [Shard(0), Shard(0)]),
}


@dataclass(frozen=True)
class State:
    """A training state in whole tensors: what ranks are to hold in parts."""

    config: DecoderConfig
    values: dict[str, Tensor]
    moments: dict[str, tuple[int, Tensor, Tensor]]

    def training(self, stack: Any, spread: Any = lambda tensor: tensor) -> TrainState:
        """A run in this state, every tensor as `spread` gives it."""
        model = stack.build_model(self.config, stack).to(next(iter(self.values.values())).dtype)
        model.load_state_dict(self.values)
        spread_parameters(model, spread)
        training = TrainState(model, stack.param_groups(model, snapshots.SETTINGS.weight_decay))
        for name, parameter in model.named_parameters():
            step, first, second = self.moments[name]
            training.optimizer_state[parameter] = AdamState(step, spread(first), spread(second))
        training.counters = Counters(100, 90, 80, 7)
        return training


def state_of(stack: Any, rng: torch.Generator, tied: bool) -> State:
    """Random values; no two tensors are alike, no two steps either."""
    config = replace(toys.TINY, tied_head=tied, **UNEVEN)
    model = stack.build_model(config, stack).to(toys.working_dtype(stack))

    def drawn(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=rng, dtype=torch.float64).to(like.dtype)

    moments = {
        name: (step, drawn(p), drawn(p)) for step, (name, p) in enumerate(model.named_parameters())
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(drawn(parameter))
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return State(config, values, moments)


def spread_parameters(model: nn.Module, spread: Any) -> None:
    """Every parameter as `spread` gives it; a tied one stays one."""
    new: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if parameter not in new:
                    new[parameter] = nn.Parameter(spread(parameter.detach()))
                setattr(module, name, new[parameter])


def found_in(training: TrainState) -> dict[str, str]:
    """Everything that is restored, in whole tensors, by its parts; all ranks ask together."""
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    head, embedding = training.model.lm_head.weight, training.model.embed_tokens.weight
    return snapshots.parts(
        {
            "parameters": {name: whole(p) for p, name in names.items()},
            "optimizer": {
                names[p]: (adam.step, whole(adam.first_moment), whole(adam.second_moment))
                for p, adam in training.optimizer_state.items()
            },
            "counters": training.counters,
            "tied": head is embedding,
        }
    )


def blank(state: State) -> State:
    """The same shapes with nothing in them."""
    values = {name: torch.zeros_like(tensor) for name, tensor in state.values.items()}
    moments = {name: (0, torch.zeros_like(m), torch.zeros_like(v))
               for name, (_, m, v) in state.moments.items()}  # fmt: skip
    return replace(state, values=values, moments=moments)


def keep(stack: Any, training: TrainState, root: Path) -> None:
    """Saves the training as it is."""
    stack.save(root, capture(training, snapshots.SETTINGS, POSITION, IDENTITY), 2, 0)


def go_on(stack: Any, training: TrainState, root: Path) -> dict[str, str]:
    """Puts the newest checkpoint into the training; what is there then, or the refusal."""
    try:
        snapshot = stack.load(latest(root), expected(training, snapshots.SETTINGS, IDENTITY))
        restore(snapshot, training)
    except ValueError as error:
        return {"refused": str(error)}
    return {**found_in(training), "position": repr(snapshot.data)}


def passed_on(
    rank: Any, stack: Any, state: State, source: Path, stages: list[tuple[str, Path]]
) -> list[dict[str, str]]:
    """Goes on from `source` in each placement, and saves into the folder beside it."""
    found = []
    for placement, folder in stages:
        shape, placements = PLACEMENTS[placement]
        mesh = mesh_of(rank, shape)

        def spread(tensor: Tensor, mesh: Any = mesh, placements: Any = placements) -> Tensor:
            return distribute_tensor(tensor.to(rank.device), mesh, placements, src_data_rank=None)

        training = blank(state).training(stack, spread)
        training.group = rank.group
        found.append(go_on(stack, training, source))
        keep(stack, training, folder)
        source = folder
    return found


# --- a save in which a rank does not do its part ---------------------------------------------


def saved_without(rank: Any, stack: Any, state: State, root: Path, how: str) -> tuple[str, float]:
    """A save in which the last rank is "missing" or "slow"; its outcome, and the seconds."""
    training = state.training(stack)
    training.group = rank.group
    snapshot = capture(training, snapshots.SETTINGS, POSITION, IDENTITY)
    snapshot = replace(snapshot, peers=replace(snapshot.peers, deadline_s=DEADLINE_S))
    is_last, real, start = rank.index == rank.world_size - 1, disk.fsync, time.monotonic()
    if is_last and how == "missing":
        time.sleep(3 * DEADLINE_S)  # or the launcher would end the others
        return "missing", 0.0

    def slow(descriptor: int) -> None:
        time.sleep(2 * DEADLINE_S if is_last else 0)
        real(descriptor)

    with mock.patch.object(disk, "fsync", slow):
        try:
            stack.save(root, snapshot, 2, 0)
            ended = "returned"
        except (OSError, ValueError) as error:
            ended = str(error)
    return ended, time.monotonic() - start


def killed_at(
    rank: Any, stack: Any, state: State, root: Path, index: int, operation: str, number: int
) -> None:
    """A save in which one rank kills itself before the n-th of its operations on the disk."""
    training = state.training(stack)
    training.group = rank.group
    real, done = getattr(disk, operation), []

    def call(*arguments: Any) -> Any:
        done.append(operation)
        if rank.index == index and len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    with mock.patch.object(disk, operation, call):
        keep(stack, training, root)


def refused_by(rank: Any, stack: Any, state: State, folders: dict[str, Path]) -> dict[str, str]:
    """How this rank's load of each folder ends."""
    training = state.training(stack)
    training.group = rank.group
    told = {}
    for name, folder in folders.items():
        expectation = expected(training, snapshots.SETTINGS, IDENTITY)
        peers = replace(expectation.peers, deadline_s=4 * DEADLINE_S)
        try:
            stack.load(folder, replace(expectation, peers=peers))
            told[name] = "accepted"
        except (OSError, ValueError) as error:
            told[name] = str(error)
    return told


def saved_whole(rank: Any, stack: Any, state: State, root: Path) -> None:
    """A save by all ranks."""
    training = state.training(stack)
    training.group = rank.group
    keep(stack, training, root)
