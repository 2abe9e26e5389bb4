"""A run that goes on in a new interpreter: `python -m gates.resumed_process FILE`."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gates import runs
from harness.contract import Role, Stack, Variant
from harness.devices import find, force_numerics
from reference.stack import ROLES

TIMEOUT_S = 300
Name = tuple[str, str]  # module, and what in it: a role, its fault, or ROLES


def importable_roles(stack: Any) -> dict[str, Name] | None:
    """Where a new process finds the roles that are not the reference's; None if one cannot be."""
    names = {}
    for role, function in stack.roles.items():
        plain = inspect.unwrap(function)  # as the harness wraps what is on trial
        if plain is not inspect.unwrap(ROLES[role]):
            name = _name(role, plain)
            if name is None:
                return None
            names[role] = name
    return names


def _name(role: str, function: Role) -> Name | None:
    module = getattr(function, "__module__", "")
    loaded = sys.modules.get(module)
    outer = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    found = getattr(loaded, outer, None)
    if found is function or isinstance(found, Variant):
        return module, outer
    return (module, "ROLES") if getattr(loaded, "ROLES", {}).get(role) is function else None


def resume(
    roles: dict[str, Name], source: runs.Text, device: torch.device, folder: Path, every: int
) -> runs.Run:
    """The run in `folder / "run"`, with dropout, gone on with by a new interpreter.

    Raises RuntimeError with that process's words if it fails.
    """
    file = folder / "work.pt"
    work = {"roles": roles, "source": source, "device": str(device), "every": every}
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
    reference = Stack(ROLES)
    replaced = {role: _found(role, name, reference) for role, name in work["roles"].items()}
    stack = runs.with_dropout(reference.replace(replaced))
    keeper = runs.checkpoints(work["folder"], work["every"], resume=True)
    torch.save(runs.train(stack, work["source"], device, keeper), f"{file}.run")


def _found(role: str, name: Name, reference: Stack) -> Role:
    found = getattr(importlib.import_module(name[0]), name[1])
    if isinstance(found, Variant):
        return found.build(reference)
    function: Role = found[role] if name[1] == "ROLES" else found
    return function


if __name__ == "__main__":
    main(sys.argv[1])
