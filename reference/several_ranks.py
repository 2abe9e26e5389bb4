"""The training command on several ranks, as torch's launcher starts them:

python -m torch.distributed.run --nproc-per-node 2 -m reference.train --distribute ddp

The launcher gives each process its RANK and WORLD_SIZE. Which code distributes is named on the
command line, as --candidate names it for the gates, and imported here by that name: the reference
itself imports no candidate.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from reference.distribute import named_parameters

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
PLAIN = "reference"  # the reference's own `distribute`, in which every rank holds everything


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
def joined(name: str | None, device: torch.device) -> Iterator[Ranks]:
    """The ranks, while their process group stands; all but the first print nothing.

    name: a module with ROLES, `ddp` for short for candidates.distributed.ddp; None: PLAIN.
    device: the kind; each rank of a host takes the device of its LOCAL_RANK.

    Raises ValueError for a name without the launcher, for a module that cannot be used, and for a
    device that has no backend here or fewer devices than ranks.
    """
    if not were_launched():
        if name is not None:
            raise ValueError(
                "--distribute needs several ranks; start them with python -m "
                "torch.distributed.run --nproc-per-node N -m reference.train"
            )
        yield Ranks(device)
        return
    roles = {} if name in (None, PLAIN) else _roles(str(name))
    own = _own_device(device)
    dist.init_process_group(_backend(own))
    try:
        index, world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(own.type, (world_size,), mesh_dim_names=("data",))
        with redirect_stdout(io.StringIO()) if index else nullcontext():
            yield Ranks(own, index, world_size, mesh, roles)
        dist.barrier()  # the launcher ends all when one has ended with a status of its own
    finally:
        dist.destroy_process_group()


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
