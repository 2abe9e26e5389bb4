"""How fast the reference trains beside transformers' Qwen2 of the same shape, eagerly on the CPU.

    python -m candidates.peers.benchmark [--at-least 0.9] [--pairs 24] [--threads N] [--shape NAME]

Both sides do one whole update on the same tokens: forward, loss, backward, one clip of the gradient,
one AdamW step with decay for matrices only. They start from the same weights and must agree on the
loss before anything is timed. Updates alternate in one process, reference first in every second
pair, so that what else the machine does hits both. The speed of a shape is the median over the pairs of

    ratio = time of transformers / time of the reference

and `at least` is its one-sided 95 % lower bound, an order statistic of the pairs that assumes
nothing about their distribution. Exit status 0 if every bound is at least `--at-least`, else 1.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import transformers
from rich.console import Console
from rich.table import Table

from reference.config import DecoderConfig, preset
from reference.model import build_model
from reference.optimizer import param_groups
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.update import TrainState, UpdateSettings, update_window
from reference.window import Microbatch, Window

SETTINGS = UpdateSettings(Schedule(peak=1e-3, total_tokens=2**40))
LOSSES_AGREE = 1e-4  # relative, over the first updates in float32


@dataclass(frozen=True)
class Shape:
    """A model and what it is fed: rows of tokens. Qwen2 always has QKV biases."""

    config: DecoderConfig
    num_rows: int
    num_tokens: int


SHAPES = {
    "bytes-0.09m": Shape(replace(preset("bytes-0.09m"), qkv_bias=True), 8, 128),
    "10m": Shape(
        DecoderConfig(
            vocabulary_size=4096,
            model_width=320,
            feed_forward_width=896,
            num_layers=8,
            num_query_heads=10,
            num_kv_heads=2,
            head_width=32,
            max_positions=1024,
            qkv_bias=True,
        ),
        4,
        256,
    ),
}


@dataclass(frozen=True)
class Timing:
    """Seconds of each update, pair by pair."""

    reference_s: list[float]
    transformers_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Time of transformers over time of the reference, in ascending order."""
        pairs = zip(self.transformers_s, self.reference_s, strict=True)
        return sorted(theirs / ours for theirs, ours in pairs)


def lower_bound_of_median(ascending: list[float], confidence: float = 0.95) -> float:
    """The largest order statistic that the median is above with this confidence.

    The number of n independent values below the median is Binomial(n, 1/2), so the median is above
    the k-th smallest value with probability P(Binomial >= k). Raises ValueError for n < 5, of which
    not even the smallest will do.
    """
    n, probability, k = len(ascending), 1.0, 0
    while (fewer := probability - math.comb(n, k) / 2**n) >= confidence:
        probability, k = fewer, k + 1
    if k == 0:
        raise ValueError(f"{n} pairs give no lower bound at {confidence}; take at least 5")
    return ascending[k - 1]


def reference_update(shape: Shape, tokens_BT: torch.Tensor) -> tuple[torch.nn.Module, Callable]:
    """The reference's model and its update: a function that returns the loss before it."""
    stack = SimpleNamespace(**ROLES)
    model = build_model(shape.config, stack)
    training = TrainState(model, param_groups(model, SETTINGS.weight_decay))
    positions = torch.arange(shape.num_tokens).expand(shape.num_rows, -1)
    microbatch = Microbatch(tokens_BT[:, :-1], tokens_BT[:, 1:].contiguous(), positions)
    window = Window((microbatch,))
    return model, lambda: update_window(training, window, stack, SETTINGS).loss_nats


def transformers_update(
    shape: Shape, tokens_BT: torch.Tensor, weights: dict[str, torch.Tensor]
) -> Callable[[], float]:
    """The same update by transformers and torch.optim, from the same weights."""
    config = shape.config
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=config.vocabulary_size,
            hidden_size=config.model_width,
            intermediate_size=config.feed_forward_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_query_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
            use_cache=False,
        )
    )
    model.load_state_dict(
        {n if n.startswith("lm_head.") else f"model.{n}": t for n, t in weights.items()}
    )
    groups = param_groups(model, SETTINGS.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, SETTINGS.schedule.peak, SETTINGS.betas, SETTINGS.epsilon, fused=True
    )
    inputs, labels = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.max_norm)
        optimizer.step()
        return loss.item()

    return update


def measure(shape: Shape, num_pairs: int) -> Timing:
    """Alternating updates after three of each that warm up and must agree on the loss."""
    torch.manual_seed(0)
    tokens_BT = torch.randint(shape.config.vocabulary_size, (shape.num_rows, shape.num_tokens + 1))
    model, ours = reference_update(shape, tokens_BT)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = transformers_update(shape, tokens_BT, weights)
    for _ in range(3):
        losses = ours(), theirs()
        if not math.isclose(*losses, rel_tol=LOSSES_AGREE):
            raise ValueError(f"the two do not train the same: losses {losses} nats a token")
    timing = Timing([], [])
    for pair in range(num_pairs):
        sides = [(ours, timing.reference_s), (theirs, timing.transformers_s)]
        for update, times_s in sides if pair % 2 == 0 else reversed(sides):
            start = time.perf_counter()
            update()
            times_s.append(time.perf_counter() - start)
    return timing


def row_of(name: str, timing: Timing, at_least: float) -> tuple[list[str], bool]:
    """The table's row of one shape, and whether it is fast enough."""
    shape, ratios = SHAPES[name], timing.ratios
    config, bound = shape.config, lower_bound_of_median(ratios)
    with torch.device("meta"):
        model = build_model(config, SimpleNamespace(**ROLES))
    heads = f"{config.num_query_heads}/{config.num_kv_heads}"
    dimensions = (config.vocabulary_size, config.model_width, config.feed_forward_width,
                  config.num_layers, heads, config.head_width)  # fmt: skip
    cells = [
        name,
        f"{sum(p.numel() for p in model.parameters()):,}",
        " ".join(map(str, dimensions)),
        f"{shape.num_rows} x {shape.num_tokens}",
        f"{statistics.median(timing.reference_s) * 1e3:.1f}",
        f"{statistics.median(timing.transformers_s) * 1e3:.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{bound:.3f}",
        "yes" if bound >= at_least else "NO",
    ]
    return cells, bound >= at_least


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table, returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m candidates.peers.benchmark",
                                     description=__doc__.partition("\n")[0])  # fmt: skip
    parser.add_argument("--at-least", type=float, default=0.9, help="the ratio asked for (0.9)")
    parser.add_argument("--pairs", type=int, default=24, help="timed pairs of updates (24)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(),
                        help="of both sides (torch's own choice)")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, action="append", help="one only; repeatable")
    options = parser.parse_args(arguments)
    if options.pairs < 5 or options.threads < 1:
        parser.error("--pairs must be at least 5, which a bound needs, and --threads at least 1")
    torch.set_num_threads(options.threads)
    console = Console()
    table = Table(title="one update of the reference beside transformers' Qwen2ForCausalLM")
    for column in ("shape", "parameters", "V D F L N/K H", "rows x tokens", "reference ms",
                   "transformers ms", "ratio", "at least (95 %)", f">= {options.at_least}"):  # fmt: skip
        table.add_column(column, justify="left" if column == "shape" else "right")
    all_fast = True
    for name in options.shape or SHAPES:
        with console.status(f"{name}: {options.pairs} pairs of updates"):
            cells, fast = row_of(name, measure(SHAPES[name], options.pairs), options.at_least)
        table.add_row(*cells)
        all_fast = all_fast and fast
    console.print(table)
    console.print(
        f"float32, eager, {torch.get_num_threads()} threads, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__} (SDPA, AdamW fused); ratio: medians of "
        f"transformers' time over the reference's, {options.pairs} alternating pairs"
    )
    return 0 if all_fast else 1


if __name__ == "__main__":
    sys.exit(main())
