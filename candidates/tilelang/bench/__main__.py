"""The operators beside their peers and the machine's limits, in one run on a GPU.

    python -m candidates.tilelang.bench [--only attention,swiglu] [--presets 1.5B,7B] [--json FILE]

Every implementation of a case is timed in turns with a cold L2 (harness.timing), forward and
backward apart; a backward is autograd's call on a kept graph. Times are medians. "of limit" holds
the bytes or the FLOPs that the operator cannot avoid against the copy bandwidth or the matrix rate
measured in the same run. A peer that cannot run is named with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch._functorch.config
from rich.console import Console
from rich.table import Table

from candidates.tilelang.bench.cases import CASES, Case
from candidates.tilelang.presets import PRESETS
from harness.timing import median_ms

OURS = "TileLang"


@dataclass(frozen=True)
class Limits:
    """What the machine was measured to reach: bytes read and written, and bf16 products."""

    copy_tb_s: float
    matrix_tflop_s: float


@dataclass(frozen=True)
class Row:
    """A case in one direction: milliseconds by implementation, and the share of the limit."""

    operator: str
    shape: str
    direction: str
    milliseconds: dict[str, float]
    of_limit: float
    memory_gib: dict[str, float] = field(default_factory=dict)


def limits(rounds: int) -> Limits:
    """A copy of 2 GiB, and a product of two 8192 x 8192 bf16 matrices."""
    source = torch.randn(2**30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = median_ms({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, rounds)
    return Limits(2 * source.nbytes / times["copy"] / 1e9, 2 * 8192**3 / times["product"] / 1e9)


def measure(case: Case, machine: Limits, rounds: int, console: Console) -> list[Row]:
    """The forward and the backward of every implementation that runs here."""
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    for name, function in case.implementations.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            result = function(*case.inputs)
        except (ImportError, RuntimeError, ValueError) as error:
            console.print(f"[yellow]{case.operator}, {case.shape}: {name} does not run: {error}")
            continue
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        outputs = result if isinstance(result, tuple) else (result,)
        cotangents = [torch.randn_like(y) for y in outputs]
        forward[name] = lambda f=function: f(*case.inputs)
        if outputs[0].requires_grad:
            backward[name] = lambda y=outputs, dy=cotangents: torch.autograd.grad(
                y, case.inputs, dy, retain_graph=True
            )
    rows = []
    for index, (direction, calls) in enumerate((("forward", forward), ("backward", backward))):
        if OURS not in calls:
            continue
        milliseconds = median_ms(calls, rounds)
        flops, moved = case.flops[index], case.bytes_moved[index]
        rate = machine.matrix_tflop_s if flops else machine.copy_tb_s
        of_limit = (flops or moved) / milliseconds[OURS] / 1e9 / rate
        rows.append(Row(case.operator, case.shape, direction, milliseconds, of_limit, memory))
    return rows


def table(rows: Sequence[Row], machine: Limits) -> Table:
    """One line a case and direction."""
    grid = Table(
        title=f"medians; copy {machine.copy_tb_s:.2f} TB/s, "
        f"matrix product {machine.matrix_tflop_s:.0f} TFLOP/s"
    )
    for name in ("operator", "shape", "", "TileLang ms", "of limit", "peers: times ours"):
        grid.add_column(name, justify="right" if name.endswith(("ms", "limit")) else "left")
    for row in rows:
        ours = row.milliseconds[OURS]
        peers = ", ".join(
            f"{name} {ms / ours:.2f}" for name, ms in row.milliseconds.items() if name != OURS
        )
        grid.add_row(
            row.operator, row.shape, row.direction, f"{ours:.3f}", f"{row.of_limit:.2f}", peers
        )
    return grid


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; exit status 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m candidates.tilelang.bench")
    parser.add_argument("--only", default=",".join(CASES), help="operators, separated by commas")
    parser.add_argument("--presets", default=",".join(PRESETS), help="Qwen2.5 sizes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    asked = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    operators, sizes = asked.only.split(","), asked.presets.split(",")
    for names, known in ((operators, CASES), (sizes, PRESETS)):
        for name in set(names) - known.keys():
            parser.error(f"unknown {name!r}; choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        console.print("the benchmark needs an NVIDIA GPU, and torch finds none")
        return 2
    # A compiled backward that came from inductor's cache may free what a kept graph needs again.
    torch._functorch.config.donated_buffer = False
    machine, rows = limits(asked.rounds), list[Row]()
    for operator in operators:
        for size in sizes:
            for case in CASES[operator](PRESETS[size]):
                rows += measure(case, machine, asked.rounds, console)
    console.print(table(rows, machine))
    if asked.json:
        content = {"limits": asdict(machine), "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
