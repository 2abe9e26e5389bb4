"""Compiles every CUDA kernel for a Hopper GPU, on a machine that need not have one.

    python -m candidates.tilelang.compile [--only matrix_product] [--presets 0.5B,7B] [--jobs 2]

needs nvcc (CUDA 12.4 or later). Each program goes through TileLang as at a launch, at the shapes of
the presets; the generated source goes through nvcc once more for the assembler's report. One line
a kernel: registers a thread, shared memory a block, bytes spilled, and whether it uses the tensor
cores' warpgroup products (wgmma) and bulk loads (TMA). Exit status 1 if a kernel does not compile
or spills more than --spilled-bytes, 2 without nvcc. Whether a kernel is right, only a GPU can say.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tilelang import PassConfigKey
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from candidates.tilelang import (
    attention,
    matrix,
    rms_norm_kernels,
    rope,
    swiglu,
    token_nll_kernels,
    token_nll_weight,
)
from candidates.tilelang.dialect import Dialect, options_of
from candidates.tilelang.presets import PRESETS, Preset

ARCH = "sm_90a"
ALLOWED_SPILL = 64  # bytes a thread: some registers once a tile, never an accumulator
HOPPER = Dialect("cuda", ARCH, num_workers=132)
Kernel = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Report:
    """One kernel's use of an SM: counts a thread for registers, bytes a block for the rest."""

    name: str
    parameters: tuple[Any, ...]
    registers: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0
    wgmma: bool = False
    tma: bool = False
    error: str = ""


def kernels(p: Preset) -> Iterator[Kernel]:
    """The programs, with the parameters of a bfloat16 model of this shape, then float32 ones."""
    d, dtype = HOPPER, "bfloat16"
    for adds in (False, True):
        yield rms_norm_kernels.rms_norm_forward, (p.width, dtype, dtype, adds)
        yield rms_norm_kernels.rms_norm_backward, (p.width, dtype, dtype, adds)
    yield rms_norm_kernels.sum_of_parts, (p.width, dtype)
    for backwards in (False, True):
        yield rope.rope_rotate, (p.query_heads, p.kv_heads, p.head_width, dtype, backwards)
    yield swiglu.swiglu_forward, (8, dtype)
    yield swiglu.swiglu_backward, (8, dtype)
    yield from _attention_kernels(p, dtype)
    heads_width = p.query_heads * p.head_width
    for outputs, inputs in ((heads_width, p.width), (p.feed_forward, p.width)):
        yield matrix.matrix_product, ((0, outputs, inputs), (False, True), dtype, True)
        yield matrix.matrix_product, ((0, inputs, outputs), (False, False), dtype, False)
        yield matrix.matrix_product, ((outputs, inputs, 0), (True, False), dtype, False)
    yield matrix.column_parts, (heads_width, dtype)
    columns = token_nll_kernels.vocabulary_tile(d, p.vocabulary, dtype)
    for keep in (False, True):
        yield token_nll_kernels.logit_tiles, (p.vocabulary, p.width, dtype, keep)
        yield token_nll_kernels.logit_gradients, (p.vocabulary, columns, dtype, keep)
    yield token_nll_kernels.with_label, (p.width, dtype)
    yield token_nll_weight.with_rows_of_labels, (p.width, dtype)
    yield token_nll_kernels.scaled, (8, dtype)
    yield matrix.matrix_product, ((0, p.width, p.width), (False, True), "float32", True)
    yield attention.attention_forward, _attention_parameters(p, "float32", True)


def _attention_parameters(p: Preset, dtype: str, packed: bool) -> tuple[Any, ...]:
    return p.query_heads, p.query_heads // p.kv_heads, p.head_width, dtype, packed, "int32"


def _attention_kernels(p: Preset, dtype: str) -> Iterator[Kernel]:
    yield attention.document_ranges, (attention.ROWS, "int32")
    yield attention.attention_delta, (
        p.query_heads, p.head_width, dtype, attention.ROWS,
    )  # fmt: skip
    for packed in (False, True):
        parameters = _attention_parameters(p, dtype, packed)
        yield attention.hopper_forward, parameters
        yield attention.hopper_backward_queries, parameters
        for atomic in (False, True):
            yield attention.hopper_backward, (*parameters, atomic)
    yield attention.hopper_round_queries, (p.query_heads, p.head_width, dtype)
    small = (p.query_heads, p.query_heads // p.kv_heads, 32, dtype, True, "int32")
    yield attention.attention_forward, small
    yield attention.attention_backward_keys, small
    yield attention.attention_backward_queries, small


def report(kernel: Kernel) -> Report:
    """Compiles one kernel and reads the assembler's report; a failure is a Report with its text."""
    program, parameters = kernel
    options = options_of(program, parameters)
    try:
        compiled = HOPPER.compile(program(HOPPER, *parameters), **options)
    except (RuntimeError, TypeError, ValueError) as error:  # what TileLang and nvcc raise
        return Report(program.__name__, parameters, error=str(error).strip()[-300:])
    source = compiled.get_kernel_source()
    registers, static, spilled, error = _assembler_report(source, options)
    dynamic = re.findall(r"\(\(int64_t\)(\d+)\)", compiled.get_host_source())
    shared = static + (int(dynamic[-1]) if "extern __shared__" in source else 0)
    return Report(
        program.__name__, parameters, registers, shared, spilled, "wgmma" in source,
        "tma_load" in source, error,
    )  # fmt: skip


def _assembler_report(source: str, options: dict[str, Any]) -> tuple[int, int, int, str]:
    """Registers, static shared bytes, spilled bytes and, if nvcc fails, what it said."""
    flags = [f"-arch={ARCH}", "-std=c++20", "-w", "-cubin", "-Xptxas=-v"]
    if options.get(PassConfigKey.TL_ENABLE_FAST_MATH):
        flags.append("--use_fast_math")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        command = ["nvcc", *flags, f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
        command += ["-o", str(file.with_suffix(".cubin")), str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, said.stderr))

    spilled = total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads")
    registers, shared = total(r"Used (\d+) registers"), total(r"(\d+) bytes smem")
    return registers, shared, spilled, said.stderr[-300:] if said.returncode else ""


def chosen(names: Sequence[str], sizes: Sequence[str]) -> list[Kernel]:
    """The kernels of these programs (all if empty) at these presets, each once."""
    every = {kernel: None for size in sizes for kernel in kernels(PRESETS[size])}
    return [kernel for kernel in every if not names or kernel[0].__name__ in names]


def compile_all(chosen_kernels: Sequence[Kernel], jobs: int) -> Iterator[Report]:
    """Reports in the order of the kernels, from processes of their own."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(report, chosen_kernels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints, and judges the spills."""
    parser = argparse.ArgumentParser(prog="python -m candidates.tilelang.compile")
    parser.add_argument("--only", default="", help="names of programs, with commas")
    parser.add_argument("--presets", default=",".join(PRESETS), help="Qwen2.5 sizes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--spilled-bytes", type=int, default=ALLOWED_SPILL, help="allowed")
    chosen_options = parser.parse_args(arguments)
    if chosen_options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {chosen_options.jobs}")
    names = [name for name in chosen_options.only.split(",") if name]
    sizes = chosen_options.presets.split(",")
    if unknown := [size for size in sizes if size not in PRESETS]:
        parser.error(f"no preset {unknown[0]!r}; there are {', '.join(PRESETS)}")
    todo = chosen(names, sizes)
    if missing := set(names) - {program.__name__ for program, _ in todo}:
        parser.error(f"no program {min(missing)!r}")
    if shutil.which("nvcc") is None:
        print("nvcc is not on the PATH: install CUDA 12.4 or later to compile the kernels")
        return 2
    print(f"{'registers':>9} {'shared':>7} {'spilled':>7} wgmma TMA  kernel for {ARCH}")
    num_failed = 0
    for r in compile_all(todo, chosen_options.jobs):
        spills = r.spilled_bytes > chosen_options.spilled_bytes
        failed = bool(r.error) or spills
        num_failed += failed
        marks = f"{'yes' if r.wgmma else '-':>5} {'yes' if r.tma else '-':>3}"
        print(
            f"{r.registers:9} {r.shared_bytes:7} {r.spilled_bytes:7} {marks}  {r.name}"
            f"{r.parameters}{'  FAILED ' + (r.error or 'spills') if failed else ''}",
            flush=True,
        )
    print(f"{len(todo)} kernels, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
