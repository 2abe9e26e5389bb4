"""What differs between a TileLang program on a CPU and on a Hopper GPU, and how one is launched.

A program is a function `program(dialect, *parameters)` that returns a TileLang prim_func. It asks
the dialect where a tile lives and what a loop is; the rest is the same text on both machines.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tilelang
import tilelang.language as T
import torch
from torch import Tensor

Shape = tuple[int, ...]
NAMESPACE = "touchstone_tilelang"  # of the operators in torch.ops
LARGEST_NUM_LINES = 2**31 - 1  # sizes of a kernel have 32 bits


@dataclass(frozen=True)
class Dialect:
    """A machine that TileLang compiles for. Two equal dialects compile to the same code.

    name: "cpu" or "cuda". arch: "" or the GPU's, such as "sm_90a". num_workers: blocks that can run
    at the same time, for programs in which each block walks over many tiles.
    """

    name: str
    arch: str = ""
    num_workers: int = field(default=1, compare=False)

    @property
    def on_gpu(self) -> bool:
        return self.name == "cuda"

    def shared(self, shape: Shape, dtype: str) -> Any:
        """A tile that all threads of a block read: the operand of a matrix product."""
        return T.alloc_shared(shape, dtype) if self.on_gpu else T.alloc_local(shape, dtype)

    def registers(self, shape: Shape, dtype: str) -> Any:
        """A tile that is spread over the threads' registers: an accumulator, a row at work."""
        return T.alloc_fragment(shape, dtype) if self.on_gpu else T.alloc_local(shape, dtype)

    def each(self, *extents: Any) -> Any:
        """A loop nest whose iterations do not depend on one another."""
        return T.Parallel(*extents) if self.on_gpu else T.grid(*extents)

    def pipelined(self, start: Any, stop: Any, num_stages: int) -> Any:
        """A serial loop whose loads may run `num_stages` iterations ahead."""
        return (
            T.Pipelined(start, stop, num_stages=num_stages)
            if self.on_gpu
            else T.serial(start, stop)
        )

    def grid(self, *blocks: Any, num_threads: int = 128) -> Any:
        """The blocks of a launch."""
        return T.Kernel(*blocks, threads=num_threads) if self.on_gpu else T.Kernel(*blocks)

    def compile(self, program: Any, **options: Any) -> Any:
        """The kernel of a prim_func. `options` are TileLang pass configurations by name."""
        if self.on_gpu:
            target = {"kind": "cuda", "arch": self.arch}
            return tilelang.compile(program, target=target, pass_configs=options or None)
        options = {**options, tilelang.PassConfigKey.TIR_DISABLE_VECTORIZE: True}
        return tilelang.compile(
            program, target="c", execution_backend="cython", pass_configs=options,
            compile_flags=["-O3", "-march=native"],
        )  # fmt: skip


def dialect_of(tensor: Tensor) -> Dialect:
    """The dialect of the device that holds `tensor`. Raises ValueError for another device."""
    return _dialect(tensor.device)


@functools.cache
def _dialect(device: torch.device) -> Dialect:
    if device.type == "cpu":
        return Dialect("cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        suffix = "a" if properties.major >= 9 else ""
        arch = f"sm_{properties.major}{properties.minor}{suffix}"
        return Dialect("cuda", arch, properties.multi_processor_count)
    raise ValueError(f"the TileLang operators run on cpu and cuda, got a tensor on {device}")


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and starts at a multiple of 16 bytes, else a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def line_of(x: Tensor) -> int:
    """Elements of one load: 16 bytes on a GPU where they divide x, else one element.

    Raises ValueError for more of them than LARGEST_NUM_LINES.
    """
    wide = 16 // x.element_size() if dialect_of(x).on_gpu else 1
    line = 1 if x.numel() % wide else wide
    if x.numel() // line > LARGEST_NUM_LINES:
        raise ValueError(
            f"{x.numel()} elements in loads of {line}: a kernel takes up to {LARGEST_NUM_LINES} "
            "loads; split the tensor"
        )
    return line


# How often each kernel was launched in this process, by the program's name.
launches: Counter[str] = Counter()


@functools.cache
def compiled(program: Callable[..., Any], dialect: Dialect, *parameters: Any) -> Any:
    """The kernel of `program(dialect, *parameters)`, compiled once a process.

    The key is everything that the text of the program depends on. On disk TileLang keeps kernels
    under a hash of that text, the target, the flags and its own version.
    """
    return dialect.compile(program(dialect, *parameters), **options_of(program, parameters))


def options_of(program: Callable[..., Any], parameters: tuple[Any, ...]) -> dict[str, Any]:
    """The pass configurations that a program asks for: its `options`, or what they return."""
    options = getattr(program, "options", {})
    return options(*parameters) if callable(options) else options


def launch(
    program: Callable[..., Any], dialect: Dialect, parameters: tuple[Any, ...], *arguments: Any
) -> None:
    """Runs the kernel of `program(dialect, *parameters)` on the arguments; counts the launch."""
    kernel = compiled(program, dialect, *parameters)
    kernel(*arguments)
    launches[program.__name__] += 1


def launches_of(*names: str) -> Callable[[], dict[str, int]]:
    """A reader of the launch counts of these programs: the attribute `kernel_calls` of a role."""
    return lambda: {name: launches[name] for name in names}


DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def dtype_name(operator: str, tensor: Tensor) -> str:
    """TileLang's name of the tensor's dtype. Raises ValueError for one the device does not take."""
    known = DTYPES.get(tensor.device.type, ())
    if tensor.dtype not in known:
        names = ", ".join(NAMES[dtype] for dtype in known) or "nothing"
        raise ValueError(
            f"{operator} takes {names} on {tensor.device.type}, got {tensor.dtype}; cast it first"
        )
    return NAMES[tensor.dtype]
