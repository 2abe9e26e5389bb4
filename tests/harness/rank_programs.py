"""Programs that the tests run in ranks."""

import os
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

ROLES = {"swiglu": lambda gate, up: gate * up}  # as a candidate: which calls of a rank are noted
WIDTH = 64
LINEAR_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def sum_of_indices(rank, stack, x):
    total = x + rank.index
    dist.all_reduce(total, group=rank.group)
    return total


def who(rank, stack):
    return rank.index, rank.world_size, str(rank.device), torch.get_num_threads(), os.getpid()


def draw(rank, stack, rng):
    return torch.rand(3), torch.rand(3, generator=rng)


def a_role(rank, stack, x):
    return stack.swiglu(x, x)


def goes_wrong(rank, stack, how):
    """Rank 1 calls a role, and does not come to the second of two all-reduces."""
    x = torch.ones(4)
    if rank.index == 1:
        stack.swiglu(x, x)
    dist.all_reduce(x)
    print("a line of rank", rank.index, flush=True)
    if rank.index == 1:
        misdeeds = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda: os._exit(3),
            "vanish": lambda: os._exit(0),
            "raise": lambda: {}["nothing here"],
            "leave": lambda: exit(0),
            "sleep": lambda: time.sleep(100),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "skip": lambda: None,
        }
        misdeeds[how]()
        return
    dist.all_reduce(x)


def part(rank, stack, how):
    """After one collective in common rank 1 issues another one than rank 0."""
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank.index == 0:
        dist.all_reduce(x)
    elif how == "kind":
        dist.all_gather_into_tensor(torch.empty(8), x)
    else:
        dist.all_reduce(torch.ones(2))
    dist.barrier()


def fail_alike(rank, stack):
    """All ranks raise the same."""
    dist.barrier()
    raise ValueError("first line\nsecond line")


def fail_within_torch(rank, stack):
    torch.nn.Linear(2, 2)(torch.ones(3))


def unpicklable(rank, stack):
    return lambda: None


def write_pid_and_wait(rank, stack, folder):
    (folder / str(rank.index)).write_text(str(os.getpid()))
    if rank.index == 0:
        time.sleep(100)
    dist.barrier()


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _backward(model):
    model(torch.ones(3, WIDTH)).square().mean().backward()


def ddp(rank, stack):
    model = DistributedDataParallel(_model())
    for _ in range(2):  # after the first backward DDP builds its buckets anew
        _backward(model)
        rank.collectives.reset()
    _backward(model)
    return rank.collectives.counts, rank.collectives.num_bytes


def fsdp2(rank, stack):
    model = _model()
    fully_shard(model[0])
    fully_shard(model)
    rank.collectives.reset()
    _backward(model)
    return rank.collectives.counts, rank.collectives.num_bytes


def dtensors(rank, stack):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    rank.collectives.reset()
    total = x.sum().redistribute(placements=[Replicate()])
    x.full_tensor()
    assert float(total.to_local()) == 64
    return rank.collectives.counts, rank.collectives.num_bytes


def every_kind(rank, stack):
    """Each kind once, on 3 floats a rank, in a group of all ranks."""
    mine, size = torch.ones(3), rank.world_size
    all_ = torch.ones(3 * size)
    dist.all_reduce(mine)
    dist.broadcast(mine, src=0)
    dist.reduce(mine, dst=0)
    dist.all_gather([torch.empty(3) for _ in range(size)], mine)
    dist.gather(mine, [torch.empty(3) for _ in range(size)] if rank.index == 0 else None, dst=0)
    dist.reduce_scatter_tensor(torch.empty(3), all_)
    dist.all_to_all_single(torch.empty(3 * size), all_)
    dist.barrier()
    peer = (rank.index + 1) % size
    sent = dist.isend(mine, peer)
    dist.recv(torch.empty(3), (rank.index - 1) % size)
    sent.wait()
    return rank.collectives.counts, rank.collectives.num_bytes


def functional(rank, stack):
    """The functional twins, of which one runs where no gradient ever will."""
    mine = torch.ones(3)
    functional_collectives.all_reduce(mine, "sum", rank.group).add(1)
    with torch.inference_mode():
        functional_collectives.all_gather_tensor(torch.ones(5), 0, rank.group).add(1)
    return rank.collectives.counts, rank.collectives.num_bytes


def in_a_part(rank, stack):
    group = dist.new_group([0, 1])
    if rank.index < 2:
        dist.all_reduce(torch.ones(5), group=group)
    return [collective.group_size for collective in rank.collectives.issued]
