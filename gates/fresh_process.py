"""A program in an interpreter of its own: `python -m gates.fresh_process FOLDER`.

Texts have other hashes there, and sets of them another order: what depends on them differs.
"""

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
HASH_SEED = "PYTHONHASHSEED"


def call(
    recipe: Recipe, program: Callable[..., Any], device: torch.device | str, *arguments: Any
) -> Any:
    """`program(stack, *arguments)` of a new interpreter, on the stack that `recipe` builds there.

    program: at the top of an importable module. device: whose numerics flags are forced. Arguments
    and the result are pickled. The new interpreter has another PYTHONHASHSEED than this one, also
    where the environment sets it. Raises RuntimeError with that interpreter's words if it fails,
    and if a text has the same hash there.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (recipe, program, str(device), torch.get_num_threads(), arguments)
        torch.save(work, Path(folder) / "work")
        done = subprocess.run(
            [sys.executable, "-m", "gates.fresh_process", folder],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                HASH_SEED: another_hash_seed(),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"the new process failed: {done.stderr[-2000:]}")
        hash_there, result = torch.load(Path(folder) / "result", weights_only=False)
    if hash_there == hash(HASH_SEED):
        raise RuntimeError("a text has the same hash in the new process: it has this one's seed")
    return result


def another_hash_seed() -> str:
    """A PYTHONHASHSEED that is not this process's: a random one is as good as never "1"."""
    return "2" if os.environ.get(HASH_SEED) == "1" else "1"


def main(folder: Path) -> None:
    """Runs what `call` wrote into the folder a moment ago, and leaves the result beside it."""
    recipe, program, device, num_threads, arguments = torch.load(
        folder / "work", weights_only=False
    )
    force_numerics(find(torch.device(device).type))
    torch.set_num_threads(num_threads)
    torch.save((hash(HASH_SEED), program(recipe.build(), *arguments)), folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
