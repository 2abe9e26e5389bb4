"""The books: one planned run as tables, each line with the ground it stands on.

Grounds: "exact" is integer arithmetic on the configuration; "convention" is exact too, but another
author may count otherwise, so the convention is printed with it; "ASSUMED" depends on a number
that nobody has measured yet and that a measurement must replace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from reference.config import DecoderConfig, ModelConfig
from reference.ledger.adapter_book import adapters_table
from reference.ledger.communication_book import communication_table
from reference.ledger.flops import FlopsConvention, flops_of_parameters, training_flops
from reference.ledger.memory import GIB, MIB, MIXED, kv_cache_bytes, training_memory
from reference.ledger.parameters import parameter_count, rotary_frequencies
from reference.ledger.tables import ASSUMED, CONVENTION, EXACT, new_table
from reference.ledger.time import training_time
from reference.ledger.windows import LastWindow, plan_windows

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, as a rule of thumb
ZERO_STAGES = (0, 1, 2, 3)
CONVENTIONS = (
    FlopsConvention("parameters", 0),
    FlopsConvention("parameters", 6),
    FlopsConvention("parameters", 12),
    FlopsConvention("products", 6),
    FlopsConvention("products", 12),
)
# To two decimals as the model cards give them (Qwen/Qwen2.5-*), beside the exact numbers.
MODEL_CARD_PARAMETERS = {
    "qwen2.5-0.5b": 490_000_000,
    "qwen2.5-1.5b": 1_540_000_000,
    "qwen2.5-3b": 3_090_000_000,
    "qwen2.5-7b": 7_610_000_000,
}


@dataclass(frozen=True)
class PlannedRun:
    """What the books are about. `peak_flops_per_s` and `utilizations` are assumptions."""

    preset: str
    config: ModelConfig
    num_tokens: int
    context_tokens: int
    num_rows: int  # a microbatch on a rank
    num_microbatches: int
    num_ranks: int
    last_window: LastWindow
    peak_flops_per_s: float
    utilizations: tuple[float, ...]
    lora_rank: int | None = None  # None: all parameters are trained


def print_book(run: PlannedRun, console: Console) -> None:
    """Print every table of `run`.

    Raises:
        ValueError: a number that one of the ledger's functions refuses; nothing is printed then.
    """
    tables = [
        inputs_table(run),
        parameters_table(run),
        memory_table(run),
        *_adapters(run),
        flops_table(run),
        time_table(run),
        communication_table(run.config, run.num_ranks, run.num_microbatches),
        cache_table(run),
        windows_table(run),
    ]
    for table in tables:
        console.print(table)
        console.print()


def _adapters(run: PlannedRun) -> list[Table]:
    if run.lora_rank is None:
        return []
    return [adapters_table(run.config, run.lora_rank, run.num_ranks)]


def inputs_table(run: PlannedRun) -> Table:
    """The shape and the choices that all other tables start from."""
    table = new_table(f"{run.preset}: what goes in", "input", "value")
    shape = "  ".join(
        f"{letter} {value:,}" for letter, value in _shape(run.config).items() if value is not None
    )
    table.add_row("shape", shape, "configuration")
    if isinstance(run.config, DecoderConfig):
        frequencies = rotary_frequencies(run.config)
        table.add_row(
            f"rope theta {run.config.rope_theta:g}",
            f"{frequencies[0]:g} to {frequencies[-1]:.3e} radians a position",
            "configuration",
        )
    table.add_row("tokens", f"{run.num_tokens:,}", "chosen")
    window = f"{run.context_tokens:,} x {run.num_rows} x {run.num_microbatches} x {run.num_ranks}"
    table.add_row("context x rows x microbatches x ranks", window, "chosen")
    table.add_row("peak a rank", f"{run.peak_flops_per_s / 1e12:g} TFLOP/s", ASSUMED)
    shares = ", ".join(f"{share:g}" for share in run.utilizations)
    table.add_row("utilization of that peak", shares, ASSUMED)
    return table


def parameters_table(run: PlannedRun) -> Table:
    """Parameters by part."""
    count = parameter_count(run.config)
    tied = count.head == 0
    table = new_table("Parameters", "part", "parameters", "share")
    parts = {
        "vocabulary table" + (", used as the head too (tied)" if tied else ""): count.embedding,
        "learned positions": count.positions,
        "attention matrices": count.attention,
        "feed-forward matrices": count.feed_forward,
        "head": count.head,
        "biases": count.biases,
        "norms": count.norms,
    }
    for name, number in parts.items():
        if number:
            table.add_row(name, f"{number:,}", f"{number / count.total:.2%}", EXACT)
    table.add_section()
    table.add_row("total P", f"{count.total:,}", "100.00%", EXACT)
    table.add_row("P without vocabulary tables", f"{count.without_vocabulary:,}", "", EXACT)
    table.add_row("in a matrix product per token", f"{count.multiplying:,}", "", EXACT)
    table.add_row("with weight decay (2-D)", f"{count.decayed:,}", "", CONVENTION)
    per_parameter = f"{run.num_tokens / count.total:.3f}"
    table.add_row("tokens a parameter", per_parameter, "", "chosen")
    rule = f"{TOKENS_PER_PARAMETER * count.total:,}"
    table.add_row(f"{TOKENS_PER_PARAMETER} P tokens would be", rule, "", CONVENTION)
    return table


def memory_table(run: PlannedRun) -> Table:
    """Model state by part and ZeRO stage, on the rank that holds most."""
    total = parameter_count(run.config).total
    states = [training_memory(total, MIXED, stage, run.num_ranks) for stage in ZERO_STAGES]
    stages = ["not divided", *(f"ZeRO {stage}" for stage in ZERO_STAGES[1:])]
    unit, size = ("GiB", GIB) if states[0].total >= GIB else ("MiB", MIB)
    table = new_table(f"Model state on each of {run.num_ranks} ranks, {unit}", "part", *stages)
    table.caption = (
        "bf16 weights and gradients (2 B), float32 master, m, v (4 B each): 16 B a parameter. Not "
        "counted: activations, buffers, context, fragmentation. 1 GiB = 2^30 B, 1 GB = 10^9 B."
    )
    parts = {
        "weights": [state.weights for state in states],
        "gradients": [state.gradients for state in states],
        "float32 master": [state.master for state in states],
        "Adam m": [state.first_moments for state in states],
        "Adam v": [state.second_moments for state in states],
    }
    for name, row in parts.items():
        table.add_row(name, *(f"{value / size:.3f}" for value in row), CONVENTION)
    table.add_section()
    table.add_row("total", *(f"{state.total / size:.3f}" for state in states), CONVENTION)
    if unit == "GiB":
        table.add_row("total, GB", *(f"{state.total_gb:.3f}" for state in states), CONVENTION)
    card = MODEL_CARD_PARAMETERS.get(run.preset)
    if card:
        rounded = [training_memory(card, MIXED, stage, run.num_ranks) for stage in ZERO_STAGES]
        values = [f"{state.total_gib:.2f}" for state in rounded]
        table.add_row(f"total, model card's {card / 1e9:g}e9", *values, "rounded")
    return table


def flops_table(run: PlannedRun) -> Table:
    """FLOPs by convention; model FLOPs and what recomputing the layers adds kept apart."""
    table = new_table(
        f"FLOPs of {run.num_tokens:,} tokens in rows of {run.context_tokens:,}",
        "model FLOPs counted as",
        "a token",
        "in all",
        "HFU / MFU",
    )
    table.caption = (
        "1 multiply-add = 2 FLOPs. MFU divides model FLOPs by time x ranks x peak; HFU divides "
        "hardware FLOPs. Their ratio is given for layers run forward twice (checkpointing)."
    )
    for convention in CONVENTIONS:
        again = replace(convention, recompute_layers=True)
        flops = training_flops(run.config, run.num_tokens, run.context_tokens, again)
        table.add_row(
            convention.text,
            f"{flops.model_per_token:,}",
            _scientific(flops.model_total),
            f"{flops.hardware_total / flops.model_total:.3f}",
            CONVENTION,
        )
    card = MODEL_CARD_PARAMETERS.get(run.preset)
    if card:
        total = flops_of_parameters(card, run.num_tokens)
        name = f"6 x model card's {card / 1e9:g}e9"
        table.add_row(name, f"{6 * card:,}", _scientific(total), "", "rounded")
    return table


def time_table(run: PlannedRun) -> Table:
    """Wall time by convention and utilization, on 1 rank, the run's ranks and 8 times as many."""
    rank_counts = sorted({1, run.num_ranks, 8 * run.num_ranks})
    columns = [f"h on {count}" for count in rank_counts]
    table = new_table(
        "Time = FLOPs / (ranks x peak x u)", "FLOPs counted as", "u", "rank-hours", *columns
    )
    table.caption = (
        f"peak {run.peak_flops_per_s / 1e12:g} TFLOP/s a rank and u are inputs, never results; u "
        "is the MFU to be reached where the peak is the device's. No start-up, evaluation, failure."
    )
    totals = {
        convention.text: training_flops(
            run.config, run.num_tokens, run.context_tokens, convention
        ).model_total
        for convention in CONVENTIONS
    }
    card = MODEL_CARD_PARAMETERS.get(run.preset)
    if card:
        totals[f"6 x model card's {card / 1e9:g}e9"] = flops_of_parameters(card, run.num_tokens)
    for name, total in totals.items():
        for share in run.utilizations:
            times = [
                training_time(total, count, run.peak_flops_per_s, share) for count in rank_counts
            ]
            hours = [f"{time.hours:,.2f}" for time in times]
            table.add_row(name, f"{share:g}", f"{times[0].rank_hours:,.2f}", *hours, ASSUMED)
    return table


def cache_table(run: PlannedRun) -> Table:
    """The key/value cache of one sequence, and what grouped queries save."""
    table = new_table("KV cache, bf16, one sequence of a full row", "heads", "bytes", "MiB")
    shapes: dict[str, ModelConfig] = {"keys and values of every head": run.config}
    if isinstance(run.config, DecoderConfig):
        heads = run.config.num_query_heads
        shapes = {
            f"{run.config.num_kv_heads} key/value heads, as configured": run.config,
            f"{heads}, if every query head had its own": replace(run.config, num_kv_heads=heads),
        }
    for name, config in shapes.items():
        size = kv_cache_bytes(config, 1, run.context_tokens, 2)
        table.add_row(name, f"{size:,}", f"{size / MIB:g}", EXACT)
    return table


def windows_table(run: PlannedRun) -> Table:
    """Updates, and the last window under the declared policy."""
    plan = plan_windows(
        run.num_tokens,
        run.context_tokens,
        run.num_rows,
        run.num_microbatches,
        run.num_ranks,
        run.last_window,
    )
    table = new_table("Windows", "what", "tokens")
    table.add_row("a window", f"{plan.window_tokens:,}", EXACT)
    table.add_row("updates (a number, not tokens)", f"{plan.num_updates:,}", EXACT)
    table.add_row("left for the last window", f"{plan.remainder_tokens:,}", EXACT)
    full = plan.total_tokens + plan.overshoot_tokens
    table.add_row("if every window were full", f"{full:,}", EXACT)
    table.add_row("of these too many", f"{plan.overshoot_tokens:,}", EXACT)
    policy = f"last window as declared ({plan.last_window})"
    table.add_row(policy, f"{plan.last_window_tokens:,}", "chosen")
    table.add_row("trained on in all", f"{plan.planned_tokens:,}", "chosen")
    return table


def _shape(config: ModelConfig) -> dict[str, int | None]:
    if isinstance(config, DecoderConfig):
        return {
            "V": config.vocabulary_size,
            "D": config.model_width,
            "F": config.feed_forward_width,
            "L": config.num_layers,
            "N": config.num_query_heads,
            "K": config.num_kv_heads,
            "H": config.head_width,
        }
    return {
        "V": config.vocabulary_size,
        "D": config.model_width,
        "L": config.num_layers,
        "N": config.num_heads,
        "T": config.max_positions,
    }


def _scientific(value: int) -> str:
    return f"{value:.12g}".replace("e+", "e")
