"""The training command on several ranks, as torch's launcher starts them:

python -m torch.distributed.run --nproc-per-node 2 -m reference.train --distribute ddp

The launcher gives each process its RANK and WORLD_SIZE. Which code distributes is named on the
command line, as --candidate names it for the gates, and imported here by that name: the reference
itself imports no candidate.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from reference.distribute import MESH_NAMES, named_parameters

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
PLAIN = "reference"  # the reference's own `distribute`, in which every rank holds everything

SHARD_DEGREE = "--data-parallel-shard-degree"


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. mesh: None for one process. roles: what `--distribute` named,
    to put into the stack.
    """

    device: torch.device
    index: int = 0
    world_size: int = 1
    mesh: Any = None
    roles: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def were_launched() -> bool:
    """Whether torch's launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(
    name: str | None, device: torch.device, shard_degree: int | None = None
) -> Iterator[Ranks]:
    """The ranks, while their process group stands; all but the first print nothing.

    name: a module with ROLES, `ddp` for short for candidates.distributed.ddp; None: PLAIN.
    device: the kind; each rank of a host takes the device of its LOCAL_RANK. shard_degree: ranks
    that share out one copy of the model; None: all of them.

    Raises ValueError for a name or a degree without the launcher, for a degree that does not divide
    the number of ranks or that PLAIN or DDP is to have, for a module that cannot be used, and for a
    device that has no backend here or fewer devices than ranks. All ranks raise it before they
    meet.
    """
    if not were_launched():
        option = "--distribute" if name is not None else SHARD_DEGREE
        if name is not None or shard_degree is not None:
            raise ValueError(
                f"{option} needs several ranks; start them with python -m "
                "torch.distributed.run --nproc-per-node N -m reference.train"
            )
        yield Ranks(device)
        return
    shape = mesh_shape(int(os.environ["WORLD_SIZE"]), shard_degree)
    roles = {} if name in (None, PLAIN) else _roles(str(name))
    _require_shards(name, roles, shape, shard_degree)
    own = _own_device(device)
    dist.init_process_group(_backend(own))
    try:
        index, world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(own.type, shape, mesh_dim_names=MESH_NAMES[len(shape) - 1])
        with redirect_stdout(io.StringIO()) if index else nullcontext():
            yield Ranks(own, index, world_size, mesh, roles)
        dist.barrier()  # the launcher ends all when one has ended with a status of its own
    finally:
        # A sharded model, which holds itself, holds its groups too; their threads must have ended
        # before the interpreter does, or now and then a rank that is done aborts.
        gc.collect()
        dist.destroy_process_group()


def mesh_shape(world_size: int, shard_degree: int | None) -> tuple[int, ...]:
    """(ranks,), or (replicas, ranks of each) where a copy of the model is on a part of the ranks.

    Raises ValueError unless shard_degree divides world_size.
    """
    if shard_degree in (None, world_size):
        return (world_size,)
    if world_size % shard_degree:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"{SHARD_DEGREE} {shard_degree} does not divide the {world_size} ranks; choose one of "
            f"{', '.join(divisors)}, or start a multiple of {shard_degree} ranks"
        )
    return (world_size // shard_degree, shard_degree)


@torch.no_grad()
def copy_whole(model: nn.Module, into: nn.Module) -> None:
    """Copies every parameter of a distributed `model` into the plain model `into`.

    All ranks call together, because shards are gathered one after the other.
    """
    wanted = dict(into.named_parameters())
    for name, parameter in named_parameters(model):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        wanted[name].copy_(whole)


def _roles(name: str) -> dict[str, Callable[..., Any]]:
    short = f"candidates.distributed.{name}"
    full = short if name.isidentifier() and _exists(short) else name
    try:
        roles: dict[str, Callable[..., Any]] = importlib.import_module(full).ROLES
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--distribute {name}: no module with ROLES: {error}") from error
    return dict(roles)


def _require_shards(
    name: str | None, roles: Mapping[str, Any], shape: tuple[int, ...], shard_degree: int | None
) -> None:
    """Refuses a degree where there are no shards: PLAIN, and what says of itself that it is DDP."""
    is_ddp = getattr(roles.get("distribute"), "communication", None) == "ddp"
    if shard_degree is not None and (is_ddp or not roles):
        raise ValueError(
            f"{SHARD_DEGREE} {shard_degree} of {prod(shape)} ranks: --distribute {name or PLAIN} "
            "keeps a copy of the model on every rank and has no shards; leave the degree out, or "
            "choose --distribute fsdp2"
        )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _own_device(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    index = int(os.environ["LOCAL_RANK"])
    count = torch.get_device_module(device).device_count()
    if index >= count:
        raise ValueError(
            f"local rank {index} needs device {index}, and this machine has {count} of kind "
            f"{device.type}; start fewer ranks"
        )
    torch.get_device_module(device).set_device(index)
    return torch.device(device.type, index)


def _backend(device: torch.device) -> str:
    backend = BACKENDS.get(device.type)
    if backend is None or not dist.is_backend_available(backend):
        raise ValueError(
            f"this torch has no backend for ranks on {device.type} (it would be {backend})"
        )
    return backend
