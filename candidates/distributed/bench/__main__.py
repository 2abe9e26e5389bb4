"""What FSDP2 costs on one device: the wrapped model beside the unwrapped one, in turns.

    python -m candidates.distributed.bench --candidate tilelang.fast --rows 8 --tokens 4096
    python -m candidates.distributed.bench --preset smoke --device cpu

Both sides hold float32 parameters, compute in bfloat16, and do one update of `--microbatches`
microbatches by the same `accumulate`, a clip and one fused AdamW step on the same random tokens.
Their losses must agree first. The ratio of throughputs is the median over pairs, "at least" its
one-sided 95 % bound. On one rank nothing is sent: the rest of fully_shard is what is measured.

What fully_shard adds is mostly the host's time, a millisecond a layer and pass, which a device that
has enough to do hides. One H200, 0.5B with tilelang.fast, two microbatches of 8 x 4096: 0.965 (at
least 0.947); of 4 x 2048, where the host is the limit: 0.69.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from candidates.distributed import fsdp2
from candidates.peers.benchmark import lower_bound_of_median
from reference.config import preset
from reference.distribute import DistributionSettings
from reference.stack import ROLES
from reference.window import Microbatch, Window

PAIRS, WARM_UP = 20, 3
LOSSES_AGREE = 2e-3  # relative, between two bfloat16 forwards of the same weights
SMOKE = "bytes-0.09m"
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
Update = Callable[[], float]


def random_window(asked: Any, vocabulary_size: int) -> Window:
    """Microbatches of random tokens in which all but each row's last are targets."""
    shape = (asked.rows, asked.tokens)
    positions = torch.arange(asked.tokens).expand(shape)
    microbatches = []
    for _ in range(asked.microbatches):
        ids = torch.randint(vocabulary_size, shape)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = -100
        microbatches.append(Microbatch(ids, labels, positions))
    return Window(tuple(microbatches)).to(asked.device)


def update_of(model: nn.Module, window: Window, group: Any, device: str) -> Update:
    """One update of a model, which returns its loss in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=device == "cuda")

    def update() -> float:
        sums = fsdp2.accumulate(model, window, group)
        fsdp2.clip_grad_norm(model.parameters(), 1.0, group)
        optimizer.step()
        return sums.nll_sum / sums.num_targets

    return update


def updates(asked: Any) -> dict[str, Update]:
    """The same model twice, plain and sharded over a mesh of one."""
    roles = dict(ROLES)
    for name in asked.candidate:
        roles.update(importlib.import_module(f"candidates.{name}").ROLES)
    stack: Any = SimpleNamespace(**roles)
    config = replace(preset(asked.preset), compute_dtype=torch.bfloat16)
    torch.manual_seed(0)
    plain = stack.build_model(config, stack).to(asked.device)
    twin = stack.build_model(config, stack).to(asked.device)
    twin.load_state_dict(plain.state_dict())
    window = random_window(asked, config.vocabulary_size)
    mesh = init_device_mesh(asked.device, (1,), mesh_dim_names=("data",))
    settings = DistributionSettings(compute_dtype=torch.bfloat16)
    sharded = fsdp2.distribute(twin, mesh, settings)
    return {
        "unwrapped": update_of(plain, window, None, asked.device),
        "fsdp2": update_of(sharded, window, dist.group.WORLD, asked.device),
    }


def seconds_of(sides: dict[str, Update], device: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of each update, in turns whose order alternates, after a warm-up.

    Raises ValueError if the first losses differ.
    """
    losses = {name: update() for name, update in sides.items()}
    if not math.isclose(*losses.values(), rel_tol=LOSSES_AGREE):
        raise ValueError(f"the two do not train the same: {losses} nats a token")
    synchronize = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(WARM_UP + pairs):
        for name in sorted(sides, reverse=index % 2 == 1):
            synchronize()
            start = time.perf_counter()
            sides[name]()
            synchronize()
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def parsed(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m candidates.distributed.bench")
    parser.add_argument("--preset", default="qwen2.5-0.5b", help="'smoke': a tiny one, for a CPU")
    parser.add_argument("--candidate", action="append", default=[], help="operators to compute by")
    parser.add_argument("--device", choices=tuple(BACKENDS), default="cuda")
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    asked = parser.parse_args(arguments)
    if asked.preset == "smoke":
        asked.preset, asked.rows, asked.tokens = SMOKE, min(asked.rows, 2), min(asked.tokens, 64)
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Exit status 2 without the device."""
    asked = parsed(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if asked.device != "cpu" and not torch.get_device_module(asked.device).is_available():
        console.print(f"torch finds no {asked.device} device; --device cpu for a smoke test")
        return 2
    dist.init_process_group(BACKENDS[asked.device], store=dist.HashStore(), rank=0, world_size=1)
    seconds = seconds_of(updates(asked), asked.device, asked.pairs)
    dist.destroy_process_group()
    num_tokens = asked.rows * asked.tokens * asked.microbatches
    title = f"{asked.preset}, {asked.microbatches} microbatches of {asked.rows} x {asked.tokens}"
    grid = Table("update", "tokens/s", "ratio", "at least", title=title)
    pairs = zip(seconds["unwrapped"], seconds["fsdp2"], strict=True)
    ratios = sorted(plain / wrapped for plain, wrapped in pairs)
    bounds = (statistics.median(ratios), lower_bound_of_median(ratios))
    for name, times in seconds.items():
        cells = [f"{x:.3f}" for x in bounds] if name == "fsdp2" else ["", ""]
        grid.add_row(name, f"{num_tokens / statistics.median(times):,.0f}", *cells)
    console.print(grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
