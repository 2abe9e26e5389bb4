"""The training loop of one process: windows in, a trained model and its records out.

`python -m reference.train --corpus language --updates 300` trains on text that needs no download.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from reference.config import PRESETS, preset
from reference.data.batches import batches, shuffle
from reference.data.corpus import language_documents, python_documents
from reference.data.labels import make_labels
from reference.data.language import language
from reference.data.pack import Rows, one_document_a_row, pack
from reference.data.tokenizer import ByteTokenizer
from reference.optimizer import AdamState
from reference.schedule import Schedule
from reference.update import Counters, TrainState, UpdateRecord, UpdateSettings
from reference.window import Window


@dataclass(frozen=True)
class TrainResult:
    """The trained model, one record a window in order, the last counters, the optimizer state."""

    model: nn.Module
    records: list[UpdateRecord]
    counters: Counters
    optimizer_state: dict[nn.Parameter, AdamState]


def train(
    config: Any,
    stack: Any,
    windows: Iterable[Window],
    settings: UpdateSettings,
    seed: int = 0,
    device: torch.device | str = "cpu",
    total_tokens: int | None = None,
    last_window: str = "overshoot",
    progress: bool = False,
) -> TrainResult:
    """Builds the model of `config` and applies every window to it with `stack.update_window`.

    seed: of the initial parameters, which are drawn on the CPU so that every device gets the same.
    total_tokens: end when this many targets were applied; None: end with the windows.
    last_window: what to do when the last window holds more targets than are left: "trim" drops
    the later ones, so exactly total_tokens are applied; "overshoot" applies them all.
    progress: a bar on standard error, if that is a terminal.

    Raises ValueError for an unknown `last_window`, for total_tokens < 1, and when the windows end
    before total_tokens (a run that is short must not look finished).
    """
    if last_window not in ("trim", "overshoot"):
        raise ValueError(f'last_window must be "trim" or "overshoot", got {last_window!r}')
    if total_tokens is not None and total_tokens < 1:
        raise ValueError(f"total_tokens must be >= 1 or None, got {total_tokens}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = stack.build_model(config, stack).to(device)
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    records: list[UpdateRecord] = []
    with _progress_bar(windows, progress) as advance:
        for window in _until(windows, training, total_tokens, last_window):
            record = stack.update_window(training, window.to(device), stack, settings)
            records.append(record)
            advance(record)
    return TrainResult(model, records, training.counters, training.optimizer_state)


def _until(
    windows: Iterable[Window], training: TrainState, total_tokens: int | None, last_window: str
) -> Iterator[Window]:
    """The windows up to `total_tokens` applied targets, the last one trimmed if that is asked."""
    if total_tokens is None:
        yield from windows
        return
    for window in windows:
        remaining = total_tokens - training.counters.tokens_updated
        is_too_long = window.num_targets > remaining
        yield window.trim(remaining) if is_too_long and last_window == "trim" else window
        if training.counters.tokens_updated >= total_tokens:
            return
    raise ValueError(
        f"the windows ended after {training.counters.tokens_updated} applied targets, before "
        f"total_tokens = {total_tokens}; give more windows or ask for fewer tokens"
    )


@contextmanager
def _progress_bar(windows: Iterable[Window], shown: bool) -> Iterator[Any]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    num_windows = len(windows) if isinstance(windows, Sized) else None
    with bar:
        task = bar.add_task("training", total=num_windows, loss="")

        def advance(record: UpdateRecord) -> None:
            bar.update(task, advance=1, loss=f"{record.loss_nats:.3f} nats/token")

        yield advance


# --- the command -----------------------------------------------------------------------------

DIFFICULTY = "hard"
ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW = 8, 2
PYTHON_BYTES, PYTHON_ROW_TOKENS = 2_000_000, 128


@dataclass(frozen=True)
class _Epochs:
    """The first `num_updates` windows of epoch after epoch, each in another order."""

    rows: Rows
    seed: int
    num_updates: int

    def __len__(self) -> int:
        return self.num_updates

    def __iter__(self) -> Iterator[Window]:
        epochs = (
            _windows(self.rows, shuffle(self.rows.num_rows, self.seed, epoch)) for epoch in count()
        )
        return islice(chain.from_iterable(epochs), self.num_updates)


def _windows(rows: Rows, order: torch.Tensor) -> Iterator[Window]:
    return batches(rows, order, make_labels, "inside", ROWS_PER_MICROBATCH, MICROBATCHES_PER_WINDOW)


def _language(seed: int) -> tuple[Rows, Rows, str]:
    """Rows to train on, rows held out, and what the held-out loss can come down to."""
    tokenizer, chosen = ByteTokenizer(), language(DIFFICULTY)
    training = [d.text for d in language_documents(DIFFICULTY, "train", 8_000, seed)]
    held_out = [d.text for d in language_documents(DIFFICULTY, "held_out", 200, seed)]
    true_nats = sum(chosen.nats(text) for text in held_out) / sum(map(len, held_out))
    rows = one_document_a_row(
        tokenizer.encode_documents(held_out), chosen.max_bytes, [len(text) for text in held_out]
    )
    packed = pack(tokenizer.encode_documents(training), chosen.max_bytes, "drop")
    return packed, rows, f"; the language itself: {true_nats:.4f} nats per token"


def _python_docs(seed: int) -> tuple[Rows, Rows, str]:
    """Every twentieth document is held out, whatever the seed."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_documents(d.data for d in python_documents(PYTHON_BYTES))
    training = [document for index, document in enumerate(tokens) if index % 20]
    return (
        pack(training, PYTHON_ROW_TOKENS, "drop"),
        pack(tokens[::20], PYTHON_ROW_TOKENS, "pad"),
        "",
    )


COMPUTE_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
CORPORA = {"language": _language, "python-docs": _python_docs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then print the held-out loss in one line. SystemExit with 2 for bad input."""
    from reference.stack import ROLES  # which imports train

    parser = _parser()
    options = parser.parse_args(arguments)
    stack, dtype = SimpleNamespace(**ROLES), COMPUTE_DTYPES[options.compute_dtype]
    config = replace(preset(options.preset), compute_dtype=dtype)
    try:
        training_rows, held_out_rows, remark = CORPORA[options.corpus](options.seed)
        longest = max(training_rows.row_tokens, held_out_rows.row_tokens)
        if config.vocabulary_size < ByteTokenizer.vocabulary_size or config.max_positions < longest:
            raise ValueError(
                f"preset {options.preset} has {config.vocabulary_size} tokens and "
                f"{config.max_positions} positions; this corpus needs "
                f"{ByteTokenizer.vocabulary_size} and {longest}"
            )
        windows = _Epochs(training_rows, options.seed, options.updates)
        total = sum(window.num_targets for window in windows)
        schedule = Schedule(options.learning_rate, total, total // 20, total // 4, 0.1)
        result = train(
            config, stack, windows, UpdateSettings(schedule), options.seed, options.device,
            progress=True,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the model was not kept", file=sys.stderr)
        return 130
    order = torch.arange(held_out_rows.num_rows)
    score = stack.evaluate(
        result.model, (window.to(options.device) for window in _windows(held_out_rows, order))
    )
    print(
        f"{result.counters.optimizer_steps} updates, {result.counters.tokens_updated:,} tokens; "
        f"held-out loss {score.nats / score.num_tokens:.4f} nats per token, "
        f"perplexity {score.perplexity:.4f}, {score.num_tokens:,} tokens{remark}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference.train",
        description="Train the reference on text that needs no download; a window is "
        f"{MICROBATCHES_PER_WINDOW} microbatches of {ROWS_PER_MICROBATCH} rows.",
    )
    parser.add_argument("--corpus", choices=CORPORA, default="language")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="bytes-0.09m")
    parser.add_argument("--updates", type=_positive, default=300, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=6e-3, metavar="PEAK")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the order")
    parser.add_argument(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        default="float32",
        help="of weights and activations in use; parameters, gradients and moments stay float32",
    )
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda or npu")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
