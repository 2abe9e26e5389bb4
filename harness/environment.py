"""What a run ran on: interpreter, packages, machine, and the state of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

STATUS = ["status", "--porcelain"]
PACKAGES = (
    "touchstone",
    "torch",
    "torch_npu",
    "triton",
    "tilelang",
    "numpy",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "transformers",
    "liger-kernel",
    "datasets",
    "tokenizers",
    "safetensors",
)


def describe_environment(folder: Path) -> dict[str, Any]:
    """Versions, cores, threads, CUDA, and the commit of ``folder`` with its changed files."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, *STATUS)
    own, own_changed = (
        _git(Path(__file__).parent, *command) for command in (["rev-parse", "HEAD"], STATUS)
    )
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "packages": _versions(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "commit": commit.strip() if commit else None,
        "touchstone_commit": own.strip() if own else None,
        "touchstone_dirty": own_changed.splitlines() if own_changed is not None else None,
        "dirty": [line[3:] for line in changed.splitlines()] if changed is not None else None,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed: absent from the evidence
    return found


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi did not answer"
    return done.stdout.splitlines()[0].strip()


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
