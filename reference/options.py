"""What the options of several commands mean."""

import argparse

import torch

COMPUTE_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def whole_number(text: str) -> int:
    """A whole number of at least 1; ArgumentTypeError otherwise."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def device(text: str) -> torch.device:
    """A device that a tensor can be put on here; ArgumentTypeError otherwise."""
    try:
        found = torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {error}") from None
    if found.type == "meta":
        raise argparse.ArgumentTypeError("'meta' holds no numbers; name a device that computes")
    return found


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device and --compute-dtype."""
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda or npu")
    parser.add_argument(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        default="float32",
        help="of weights and activations in use; parameters, gradients and moments stay float32",
    )
