"""compute-sanitizer over the kernels of the operators, at small shapes, on a Hopper GPU.

    python -m candidates.tilelang.sanitize [--tools memcheck,racecheck] [--timeout 1200]

memcheck finds accesses outside of an allocation (torch gives each tensor its own, here), racecheck
conflicts in shared memory. Each tool first sees the programs of `planted`, whose error it must
report, and then the operators, forward and backward, where it must report nothing. Their shapes
are of one tile and one more token, so few loops go round often: races that only many rounds show
are for the repeats of the M4 gates to find. Kernels are compiled first, outside of the time limit.
Exit status 1 where it is otherwise, 2 without such a GPU or without compute-sanitizer.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tilelang.env import CUDA_HOME

from candidates.tilelang.sanitize.calls import FINISHED, OPERATORS
from candidates.tilelang.sanitize.planted import PLANTED

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?$|hazards? displayed)", re.M
)
# Allocations of their own, so that the end of a tensor is the end of its memory; and what torch
# asks of cuBLAS in deterministic mode.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on the PATH, or in the CUDA toolkit that TileLang uses."""
    found = shutil.which("compute-sanitizer")
    if found or not CUDA_HOME:
        return found
    return shutil.which("compute-sanitizer", path=str(Path(CUDA_HOME, "bin")))


def judge(name: str, output: str) -> str:
    """What is wrong, or "": each program ran to its end, and only a planted error was reported."""
    counts = SUMMARY.findall(output)
    if not counts or FINISHED not in output:
        return f"did not run to its end: {output.strip()[-600:]}"
    reported = int(counts[-1]) > 0
    if name == OPERATORS:
        lines = [line for line in output.splitlines() if line.startswith("=====")]
        return "\n".join(lines[:60]) if reported else ""
    text = PLANTED[name].report
    return "" if reported and text in output else f"no report of {text!r}: {output[-600:]}"


def run(before: Sequence[str], name: str, seconds: float | None = None) -> str:
    """All that the program says, run as the arguments of the command `before`.

    After `seconds` it and its tool are killed, as they are if this process is interrupted.
    """
    command = [*before, sys.executable, "-m", "candidates.tilelang.sanitize.calls", name]
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0]
    except BaseException as stopped:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        if not isinstance(stopped, subprocess.TimeoutExpired):
            raise
        return f"{output}\nnot done after {seconds:g} s: see --timeout"


def missing() -> str:
    """What this machine lacks, or ""."""
    lacks = []
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        lacks.append("a Hopper GPU")
    if sanitizer() is None:
        lacks.append("compute-sanitizer, which the CUDA toolkit brings")
    return " and ".join(lacks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools one after another and prints a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m candidates.tilelang.sanitize")
    parser.add_argument("--tools", default=",".join(TOOLS), help="with commas")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each run")
    asked = parser.parse_args(arguments)
    tools = asked.tools.split(",")
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        parser.error(f"unknown tool {unknown[0]!r}; choose from {', '.join(TOOLS)}")
    if asked.timeout <= 0:
        parser.error(f"--timeout must be over 0 seconds, got {asked.timeout:g}")
    if lacks := missing():
        print(f"this needs {lacks}, and none was found")
        return 2
    if FINISHED not in (output := run((), OPERATORS)):
        print(f"without a tool the operators do not run to their end: {output.strip()[-600:]}")
        return 1
    num_failed = 0
    for tool in tools:
        before = (str(sanitizer()), "--tool", tool, "--print-limit", "5")
        planted = [name for name, program in PLANTED.items() if program.tool == tool]
        for name in (*planted, OPERATORS):
            wrong = judge(name, run(before, name, asked.timeout))
            num_failed += bool(wrong)
            expected = "no report" if name == OPERATORS else "the planted error reported"
            print(f"{tool:9} {name:27} {'FAILED ' + wrong if wrong else expected}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
