"""compute-sanitizer over every kernel of the operators, at small shapes, on a GPU.

    python -m candidates.tilelang.sanitize [--tools memcheck,racecheck] [--timeout 1200]

memcheck finds accesses outside of an allocation (torch gives each tensor its own, here), racecheck
conflicts in shared memory. Each tool first sees the programs of `planted`, whose errors it must
report, and then the operators, forward and backward, with atomics and in order, where it must
report nothing. Exit status 1 where it is otherwise, 2 without a GPU or without compute-sanitizer.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

from candidates.tilelang.sanitize.planted import PLANTED

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")
# Allocations of their own, so that the end of a tensor is the end of its memory; and what torch
# asks of cuBLAS in deterministic mode.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on the PATH, or in the CUDA toolkit that torch finds."""
    folder = Path(CUDA_HOME or "", "bin")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(folder))


def num_reported(output: str) -> int | None:
    """The count in the tool's summary; None if there is none, as when it was stopped."""
    counts = SUMMARY.findall(output)
    return int(counts[-1]) if counts else None


def judge(name: str, count: int | None, status: int, output: str) -> str:
    """What is wrong, or "": a planted error must be reported, operators must end well without."""
    if count is None:
        return "the tool gave no summary: " + output.strip()[-300:]
    if name in PLANTED:
        return "" if count else f"the planted error was not seen: {output.strip()[-300:]}"
    if count:
        return output.strip()[:3000]
    return f"ended with status {status}: {output.strip()[-300:]}" if status else ""


def run(path: str, tool: str, name: str, seconds: float) -> tuple[int | None, str]:
    """The number of reports, and what is wrong with it or ""."""
    command = [path, "--tool", tool, "--print-limit", "5", sys.executable, "-m"]
    command += ["candidates.tilelang.sanitize.calls", name]
    try:
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, timeout=seconds, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as stopped:  # its output is bytes, whatever was asked for
        reached = (stopped.stdout or b"nothing").decode().strip()[-300:]
        return None, f"not done after {seconds:g} s (--timeout); it had come to: {reached}"
    count = num_reported(done.stdout)
    return count, judge(name, count, done.returncode, done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools one after another and prints a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m candidates.tilelang.sanitize")
    parser.add_argument("--tools", default=",".join(TOOLS), help="with commas")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each run")
    asked = parser.parse_args(arguments)
    tools = asked.tools.split(",")
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        parser.error(f"unknown tool {unknown[0]!r}; choose from {', '.join(TOOLS)}")
    path = sanitizer()
    if path is None or not torch.cuda.is_available():
        missing = "an NVIDIA GPU" if path else "compute-sanitizer, which the CUDA toolkit brings"
        print(f"this needs {missing}, and none was found")
        return 2
    num_failed = 0
    for tool in tools:
        planted = [name for name, program in PLANTED.items() if program.tool == tool]
        for name in (*planted, "operators"):
            count, wrong = run(path, tool, name, asked.timeout)
            num_failed += bool(wrong)
            verdict = f"FAILED {wrong}" if wrong else "as it must be"
            reports = "no summary" if count is None else f"{count} reports"
            print(f"{tool:9} {name:27} {reports}: {verdict}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
