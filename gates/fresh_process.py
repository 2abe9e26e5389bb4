"""A program in an interpreter of its own: `python -m gates.fresh_process FOLDER`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.devices import find, force_numerics
from harness.portable import Recipe

TIMEOUT_S = 300


def call(
    recipe: Recipe, program: Callable[..., Any], device: torch.device | str, *arguments: Any
) -> Any:
    """`program(stack, *arguments)` of a new interpreter, on the stack that `recipe` builds there.

    program: at the top of an importable module. device: whose numerics flags are forced. Arguments
    and the result are pickled. Raises RuntimeError with that interpreter's words if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (recipe, program, str(device), torch.get_num_threads(), arguments)
        torch.save(work, Path(folder) / "work")
        done = subprocess.run(
            [sys.executable, "-m", "gates.fresh_process", folder],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"the new process failed: {done.stderr[-2000:]}")
        return torch.load(Path(folder) / "result", weights_only=False)


def main(folder: Path) -> None:
    """Runs what `call` wrote into the folder a moment ago, and leaves the result beside it."""
    recipe, program, device, num_threads, arguments = torch.load(
        folder / "work", weights_only=False
    )
    force_numerics(find(torch.device(device).type))
    torch.set_num_threads(num_threads)
    torch.save(program(recipe.build(), *arguments), folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
