"""A whole training step on a GPU: the stack with a candidate's operators, and transformers + Liger.

    python -m candidates.peers.step [--candidate tilelang.fast] [--presets 0.5b,1.5b] [--rows 8]

Both sides hold bf16 parameters, gradients and Adam states and do forward, loss, backward and one
fused AdamW step on the same random tokens, 8 rows of 4096. Their losses must agree first. Steps
take turns in one process; the ratio is the median over pairs, "at least" its one-sided 95 % bound.
The peer is the fastest known: transformers with every kernel of Liger and attention by cuDNN.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from candidates.peers.benchmark import lower_bound_of_median, qwen2_config, qwen2_names
from reference.config import DecoderConfig, preset
from reference.stack import ROLES

NUM_TOKENS, PAIRS, WARM_UP = 4096, 12, 3
LOSSES_AGREE = 2e-3  # relative, between two bf16 forwards of the same weights
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Side:
    """Seconds of each step, the GiB at its peak, and the first loss in nats."""

    seconds: list[float]
    peak_gib: float
    loss_nats: float

    def tokens_a_second(self, num_tokens: int) -> float:
        return num_tokens / statistics.median(self.seconds)


def our_step(
    config: DecoderConfig, candidates: Sequence[str], tokens_BT: Tensor
) -> tuple[nn.Module, Step]:
    """One step of the reference's decoder with the candidates' roles in it."""
    roles = dict(ROLES)
    for name in candidates:
        roles.update(importlib.import_module(f"candidates.{name}").ROLES)
    stack = SimpleNamespace(**roles)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = stack.build_model(config, stack).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    inputs, labels = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].flatten()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        # No name for the hidden states: nothing needs them after the loss.
        nll, count = stack.token_nll(model(inputs).flatten(0, 1), model.lm_head.weight, labels)
        loss = nll / count
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def liger_step(config: DecoderConfig, tokens_BT: Tensor, weights: dict[str, Tensor]) -> Step:
    """The same step by transformers' Qwen2 with Liger's kernels, from the same weights."""
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    apply_liger_kernel_to_qwen2()
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            qwen2_config(config),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )
    model.load_state_dict(qwen2_names(weights))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    inputs, labels = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(config: DecoderConfig, candidates: Sequence[str], num_rows: int) -> dict[str, Side]:
    """Pairs of steps in turns, after warm-up and agreement on the loss."""
    torch.manual_seed(0)
    shape = (num_rows, NUM_TOKENS + 1)
    tokens_BT = torch.randint(config.vocabulary_size, shape, device="cuda")
    model, ours = our_step(config, candidates, tokens_BT)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps = {"ours": ours, "liger": liger_step(config, tokens_BT, weights)}
    del weights
    losses = {name: float(step()) for name, step in steps.items()}
    if not math.isclose(*losses.values(), rel_tol=LOSSES_AGREE):
        raise ValueError(f"the two do not train the same: {losses} nats a token")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0.0)
    for index in range(WARM_UP + PAIRS):
        for name in sorted(steps, reverse=index % 2 == 1):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            steps[name]()
            torch.cuda.synchronize()
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() / 2**30)
    # Both sides stay allocated: each peak holds the other's parameters, gradients, two Adam states.
    other_gib = 4 * 2 * sum(p.numel() for p in model.parameters()) / 2**30
    return {n: Side(seconds[n], peaks[n] - other_gib, losses[n]) for n in steps}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Exit status 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m candidates.peers.step")
    parser.add_argument(
        "--candidate", action="append", help="default: tilelang.fast; 'none': the reference"
    )
    parser.add_argument("--presets", default="0.5b,1.5b")
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args(arguments)
    candidates = [n for n in asked.candidate or ["tilelang.fast"] if n != "none"]
    console = Console(width=None if sys.stdout.isatty() else 140)
    if not torch.cuda.is_available():
        console.print("the benchmark needs an NVIDIA GPU, and torch finds none")
        return 2
    grid = Table(title=f"{asked.rows} rows of {NUM_TOKENS} tokens, bf16, AdamW")
    for name in (
        "model",
        "ours tok/s",
        "GiB",
        "transformers + Liger tok/s",
        "GiB",
        "ratio",
        "at least",
    ):
        grid.add_column(name, justify="right")
    for size in asked.presets.split(","):
        sides = measure(preset(f"qwen2.5-{size}"), candidates, asked.rows)
        pairs = zip(sides["liger"].seconds, sides["ours"].seconds, strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        cells = [size]
        for side in sides.values():
            rate = side.tokens_a_second(asked.rows * NUM_TOKENS)
            cells += [f"{rate:,.0f}", f"{side.peak_gib:.1f}"]
        bounds = (statistics.median(ratios), lower_bound_of_median(ratios))
        grid.add_row(*cells, *(f"{x:.3f}" for x in bounds))
        gc.collect()
        torch.cuda.empty_cache()
    console.print(grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
