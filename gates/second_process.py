"""The same operators, by name, in a second process: `python -m gates.second_process FILE`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.devices import find, force_numerics

TIMEOUT_S = 300


def importable(role: str, function: Callable[..., Any]) -> tuple[str, str] | None:
    """(module, name) under which another process finds the function, or None.

    The name is the function's own, or `ROLES` for what only the module's dict of roles holds.
    """
    function = getattr(function, "__wrapped__", function)  # as the harness wraps what is on trial
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    loaded = sys.modules.get(module)
    if loaded is None:
        return None
    if getattr(loaded, name, None) is function:
        return module, name
    return (module, "ROLES") if getattr(loaded, "ROLES", {}).get(role) is function else None


def another_process(
    roles: dict[str, tuple[str, str] | None], prepared: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """What a new interpreter computes from the same arguments, on the CPU, by name.

    `prepared` has for each name a `case`, its `tensors` and the `cotangents` of its outputs. Raises
    RuntimeError with the other process's words if it fails.
    """
    jobs = {
        name: {
            "role": one.case.role,
            "arguments": one.case.arguments(one.tensors),
            "inputs": list(one.tensors),
            "outputs": one.case.outputs,
            "cotangents": one.cotangents,
        }
        for name, one in prepared.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.pt"
        device = next(iter(next(iter(prepared.values())).tensors.values())).device.type
        torch.save(
            {"roles": roles, "jobs": jobs, "device": device, "threads": torch.get_num_threads()},
            file,
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-m", "gates.second_process", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"the second process failed: {done.stderr[-2000:]}")
        results: dict[str, dict[str, Tensor]] = torch.load(f"{file}.results")
        return results


def main(file: str) -> None:
    """Runs the jobs of a file and writes their results beside it."""
    work = torch.load(file, weights_only=False)  # written by this very program a moment ago
    force_numerics(find(work["device"]))
    torch.set_num_threads(work["threads"])
    results = {name: results_of(job, work["roles"]) for name, job in work["jobs"].items()}
    torch.save(results, f"{file}.results")


def results_of(job: dict[str, Any], roles: dict[str, tuple[str, str]]) -> dict[str, Tensor]:
    """Outputs and gradients by name, on the CPU."""
    module, name = roles[job["role"]]
    found = getattr(importlib.import_module(module), name)
    outputs = (found[job["role"]] if name == "ROLES" else found)(*job["arguments"])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    forward = dict(zip(job["outputs"], outputs, strict=True))
    inputs = [x for x in job["arguments"] if isinstance(x, Tensor) and x.requires_grad]
    wanted = [forward[name] for name in job["cotangents"]]
    gradients = torch.autograd.grad(wanted, inputs, list(job["cotangents"].values()))
    backward = {f"d{name}": x for name, x in zip(job["inputs"], gradients, strict=True)}
    results = {**{name: forward[name] for name in job["cotangents"]}, **backward}
    return {name: x.detach().cpu() for name, x in results.items()}


if __name__ == "__main__":
    main(sys.argv[1])
