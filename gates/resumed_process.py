"""A run that goes on in a new interpreter: `python -m gates.resumed_process FILE`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from gates import runs
from harness.devices import find, force_numerics
from harness.portable import Recipe

TIMEOUT_S = 300


def resume(
    recipe: Recipe, source: runs.Text, device: torch.device, folder: Path, every: int
) -> runs.Run:
    """The run in `folder / "run"`, with dropout, gone on with by a new interpreter.

    Raises RuntimeError with that process's words if it fails.
    """
    file = folder / "work.pt"
    work = {"recipe": recipe, "source": source, "device": str(device), "every": every}
    torch.save({**work, "folder": folder / "run", "threads": torch.get_num_threads()}, file)
    done = subprocess.run(
        [sys.executable, "-m", "gates.resumed_process", str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the new process failed: {done.stderr[-2000:]}")
    run: runs.Run = torch.load(f"{file}.run", weights_only=False)
    return run


def main(file: str) -> None:
    """Goes on with the run that a file describes, and writes what was seen beside it."""
    work = torch.load(file, weights_only=False)  # written by this very program a moment ago
    device = torch.device(work["device"])
    force_numerics(find(device.type))
    torch.set_num_threads(work["threads"])
    stack = runs.with_dropout(work["recipe"].build())
    keeper = runs.checkpoints(work["folder"], work["every"], resume=True)
    torch.save(runs.train(stack, work["source"], device, keeper), f"{file}.run")


if __name__ == "__main__":
    main(sys.argv[1])
