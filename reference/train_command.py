"""The command `python -m reference.train`: from random or open weights, on text that is here."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from reference import replay_command, several_ranks
from reference.checkpoint.commit import latest
from reference.config import ModelConfig, preset
from reference.data.folder_text import (
    FolderText,
    open_folder,
    require_tokenizer,
    with_vocabulary,
)
from reference.data.loader import Loader
from reference.data.open_tokenizer import Tokenizer
from reference.data.remarks import warnings
from reference.data.tokenizer import ByteTokenizer
from reference.data.training_text import (
    TrainingText,
    Windows,
    language_text,
    python_text,
)
from reference.data.visible import visible
from reference.distribute import DistributionSettings, recompute_layers
from reference.evaluate import bits_per_byte
from reference.hf.folder import refuse_place
from reference.hf.start import start_from
from reference.identity import identity_of
from reference.interruption import STOPPED, signals_asked_to_wait
from reference.lora import PROJECTIONS
from reference.options import COMPUTE_DTYPES
from reference.resume import Checkpoints
from reference.resumed_options import OPTIONS, kept_options
from reference.schedule import Schedule
from reference.several_ranks import Ranks
from reference.train import TrainResult, initial_model, train
from reference.train_options import (
    ADAPTERS_RATE,
    DEFAULT_CHECKPOINT_EVERY,
    DEFAULT_PRESET,
    DEFAULT_ROW_TOKENS,
    OPEN_WEIGHTS_RATE,
    RANDOM_START_RATE,
    parser_of_train,
)
from reference.update import UpdateSettings


@dataclass(frozen=True)
class _Start:
    model: nn.Module
    tokenizer: Tokenizer
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
    parser = parser_of_train()
    options = parser.parse_args(given)
    try:
        _check(options)
        degree = options.data_parallel_shard_degree
        with several_ranks.joined(options.distribute, options.device, degree) as ranks:
            options.device = ranks.device
            return _run(options, SimpleNamespace(**{**ROLES, **ranks.roles}), ranks)
    except ValueError as error:
        parser.error(visible(str(error), "\n"))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the model was not kept", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, stack: Any, ranks: Ranks) -> int:
    torch.manual_seed(options.seed)  # torch gives every process another one
    folder = open_folder(options.data, stack) if options.data else None
    start = _start(options, stack, folder)
    text = folder or _text(options, start)
    _require_positions(
        start.config, text.row_tokens, "--window-tokens of prepare" if folder else "--row-tokens"
    )
    for warning in warnings(folder.manifest) if folder and ranks.index == 0 else []:
        print(f"warning: {visible(warning)}", file=sys.stderr, flush=True)
    windows = text.windows(options.seed, options.updates)
    if not _is_resumed(options) and ranks.index == 0:
        print(f"before: {_score(stack, start.model, text, options.device)}", flush=True)
    # In the host's memory: a shard is to be all that a device holds.
    plain = copy.deepcopy(start.model).cpu() if ranks.mesh else start.model
    result, signal_name = _train(options, stack, start, text, windows, ranks)
    counters = result.counters
    if result.stopped:
        reason = signal_name or "a signal to another rank"
        print(f"{reason}: stopped after {counters.optimizer_steps} updates, which are "
              f"kept in {options.checkpoints}; go on with --resume")  # fmt: skip
        return STOPPED
    if ranks.mesh:
        several_ranks.copy_whole(result.model, plain)
    if ranks.index == 0:
        plain.to(options.device)
        print(
            f"{counters.optimizer_steps} updates, {counters.tokens_updated:,} tokens; "
            f"{_score(stack, plain, text, options.device)}{text.remark}"
        )
        if isinstance(windows, Loader) and len(windows):
            print(windows.waiting)
        _keep(options, stack, plain, start.tokenizer)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuses before the work what would be refused after it."""
    if options.data and (options.corpus or options.row_tokens):
        raise ValueError("--data brings its own text and windows; leave --corpus and --row-tokens")
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


def _start(options: argparse.Namespace, stack: Any, folder: FolderText | None) -> _Start:
    compute_dtype = COMPUTE_DTYPES[options.compute_dtype]
    tokenizer: Tokenizer
    if options.init:
        opened = start_from(options.init, stack, options.device, compute_dtype)
        model, tokenizer, rate = opened.model, opened.tokenizer, OPEN_WEIGHTS_RATE
        if folder:
            require_tokenizer(folder, tokenizer)
    else:
        config = replace(preset(options.preset or DEFAULT_PRESET), compute_dtype=compute_dtype)
        tokenizer, rate = ByteTokenizer(), RANDOM_START_RATE
        if folder:
            tokenizer = folder.tokenizer
            config = with_vocabulary(config, tokenizer)
        else:
            _require_bytes(config, options.preset)
        model = initial_model(config, stack, options.seed, options.device)
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
    if options.corpus == "python-docs":
        row_tokens = options.row_tokens or DEFAULT_ROW_TOKENS
        return python_text(start.tokenizer, row_tokens, options.corpus_bytes)
    return language_text(start.tokenizer, options.row_tokens, options.seed)


def _require_positions(config: Any, row_tokens: int, option: str) -> None:
    if config.max_positions < row_tokens:
        raise ValueError(
            f"rows have {row_tokens} tokens, the model {config.max_positions} positions; "
            f"choose another {option}, or another model"
        )


def _is_resumed(options: argparse.Namespace) -> bool:
    """Whether the run goes on from a checkpoint; says so if there was to be one and is none."""
    if not options.resume:
        return False
    if latest(options.checkpoints) is None:
        print(f"nothing to resume in {options.checkpoints}; starting", flush=True)
        return False
    return True


def _train(
    options: argparse.Namespace,
    stack: Any,
    start: _Start,
    text: TrainingText | FolderText,
    windows: Windows | Loader,
    ranks: Ranks,
) -> tuple[TrainResult, str | None]:
    """The result, and the name of the signal that stopped the run."""
    total = windows.num_targets
    schedule = Schedule(start.learning_rate, total, total // 20, total // 4, 0.1)
    going_on = SimpleNamespace(**{**vars(stack), "build_model": lambda config, stack: start.model})
    settings = UpdateSettings(schedule)
    distribution = None
    if ranks.mesh:
        distribution = DistributionSettings(
            start.config.compute_dtype, options.checkpoint_activations
        )
    elif options.checkpoint_activations:
        recompute_layers(start.model)
    if not options.checkpoints:
        return train(
            start.config, going_on, windows, settings, options.seed, options.device, progress=True,
            mesh=ranks.mesh, distribution=distribution,
        ), None  # fmt: skip
    with signals_asked_to_wait() as interruption:
        checkpoints = Checkpoints(
            options.checkpoints,
            options.checkpoint_every or DEFAULT_CHECKPOINT_EVERY,
            resume=options.resume,
            identity={
                **identity_of(text, start.tokenizer),
                OPTIONS: kept_options(options, start.learning_rate),
            },
            stop=interruption.has_come,
            announce=partial(print, flush=True),
        )
        result = train(
            start.config, going_on, windows, settings, options.seed, options.device, progress=True,
            checkpoints=checkpoints, mesh=ranks.mesh, distribution=distribution,
        )  # fmt: skip
        return result, interruption.name


def _score(
    stack: Any, model: nn.Module, text: TrainingText | FolderText, device: torch.device
) -> str:
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
