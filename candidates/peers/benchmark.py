"""How fast the reference trains beside transformers' Qwen2 of the same shape, eagerly on the CPU.

    python -m candidates.peers.benchmark [--at-least 0.9] [--seconds 20] [--threads N]

Both sides do one whole update on the same tokens: forward, loss, backward, one clip of the whole
gradient, one AdamW step with decay for matrices only. They start from the same weights and must
agree on the loss before anything is timed. Updates alternate in one process, and the side that goes
first alternates too, so that what else the machine does hits both. The speed of a shape is the
median over the pairs of

    ratio = time of transformers / time of the reference

and "at least" is its one-sided 95 % lower bound, an order statistic of the pairs that assumes
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
MIN_PAIRS = 12
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
    the k-th smallest value with probability P(Binomial >= k). Raises ValueError where not even
    the smallest will do (n < 5 at 0.95).
    """
    n, probability, k = len(ascending), 1.0, 0
    while (fewer := probability - math.comb(n, k) / 2**n) >= confidence:
        probability, k = fewer, k + 1
    if k == 0:
        raise ValueError(f"{n} pairs give no lower bound at {confidence}; take more")
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


def qwen2_config(config: DecoderConfig) -> transformers.Qwen2Config:
    """The same shape for transformers."""
    return transformers.Qwen2Config(
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


def qwen2_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's weights by the names of transformers' Qwen2."""
    return {n if n.startswith("lm_head.") else f"model.{n}": t for n, t in weights.items()}


def transformers_update(
    shape: Shape, tokens_BT: torch.Tensor, weights: dict[str, torch.Tensor]
) -> Callable[[], float]:
    """The same update by transformers and torch.optim, from the same weights."""
    model = transformers.Qwen2ForCausalLM(qwen2_config(shape.config))
    model.load_state_dict(qwen2_names(weights))
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


def measure(shape: Shape, seconds: float) -> Timing:
    """Alternating updates for about `seconds`, after three of each that must agree on the loss."""
    torch.manual_seed(0)
    tokens_BT = torch.randint(shape.config.vocabulary_size, (shape.num_rows, shape.num_tokens + 1))
    model, ours = reference_update(shape, tokens_BT)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = transformers_update(shape, tokens_BT, weights)
    for _ in range(3):
        losses = ours(), theirs()
        if not math.isclose(*losses, rel_tol=LOSSES_AGREE):
            raise ValueError(f"the two do not train the same: losses {losses} nats a token")
    timing, begin = Timing([], []), time.perf_counter()
    while len(timing.reference_s) < MIN_PAIRS or time.perf_counter() - begin < seconds:
        sides = [(ours, timing.reference_s), (theirs, timing.transformers_s)]
        for update, times_s in sides if len(timing.reference_s) % 2 == 0 else reversed(sides):
            start = time.perf_counter()
            update()
            times_s.append(time.perf_counter() - start)
    return timing


def described(name: str) -> str:
    """The shape in words, for the table."""
    shape = SHAPES[name]
    config = shape.config
    with torch.device("meta"):
        model = build_model(config, SimpleNamespace(**ROLES))
    return (
        f"{name}, {sum(p.numel() for p in model.parameters()):,} parameters\n"
        f"V {config.vocabulary_size} D {config.model_width} F {config.feed_forward_width} "
        f"L {config.num_layers}\n"
        f"N {config.num_query_heads} K {config.num_kv_heads} H {config.head_width} "
        f"rows {shape.num_rows} T {shape.num_tokens}"
    )


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m candidates.peers.benchmark",
                                     description=__doc__.partition("\n")[0])  # fmt: skip
    parser.add_argument("--at-least", type=float, default=0.9, help="the ratio asked for (0.9)")
    parser.add_argument("--seconds", type=float, default=20.0,
                        help=f"time for each shape, at least {MIN_PAIRS} pairs (20)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1,
                        help="of both sides (1, which other load disturbs least)")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, action="append", help="one only; repeatable")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table, returns the exit status."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    table = Table(title="One update of the reference beside transformers' Qwen2ForCausalLM",
                  show_lines=True)  # fmt: skip
    for column in ("shape", "ours\nms", "theirs\nms", "pairs", "ratio", "at\nleast"):
        table.add_column(column, justify="left" if column == "shape" else "right", no_wrap=True)
    slow = []
    for name in options.shape or SHAPES:
        with console.status(f"{name}: alternating updates for {options.seconds:g} s"):
            timing = measure(SHAPES[name], options.seconds)
        bound = lower_bound_of_median(timing.ratios)
        table.add_row(
            described(name),
            f"{statistics.median(timing.reference_s) * 1e3:.1f}",
            f"{statistics.median(timing.transformers_s) * 1e3:.1f}",
            str(len(timing.ratios)),
            f"{statistics.median(timing.ratios):.3f}",
            f"{bound:.3f}",
        )
        slow += [name] if bound < options.at_least else []
    console.print(table)
    console.print(
        f"float32, eager, threads: {torch.get_num_threads()}, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__} (SDPA, fused AdamW); medians"
    )
    if slow:
        console.print(
            f"NOT SHOWN to be at least {options.at_least} times as fast: {', '.join(slow)}; where "
            "the ratio itself is above that, a quieter machine or more --seconds will tell"
        )
    else:
        console.print(f"every shape is at least {options.at_least} times as fast as transformers")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
