"""TileLang programs with one error each, which a sanitizer must report: it is shown to see them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang
import tilelang.language as T
import torch

from candidates.tilelang.dialect import Dialect, dialect_of, launch

THREADS = 128
WIDTH = 64
UNGUARDED = {
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_OUT_OF_BOUND_WARNING: True,
}
# As in the Hopper programs of attention: TileLang adds no barrier to those that the text states.
UNSYNCHRONISED = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def writes_beyond(d: Dialect) -> Any:
    """The last of THREADS threads writes behind the end of x [THREADS - 1]."""

    @T.prim_func
    def program(x: T.Tensor((THREADS - 1,), "float32")):
        with T.Kernel(1, threads=THREADS):
            x[T.get_thread_binding()] = 1.0

    return program


def reads_before_the_barrier(d: Dialect) -> Any:
    """x [THREADS] in reverse order by way of shared memory, with no barrier before the reads."""

    @T.prim_func
    def program(x: T.Tensor((THREADS,), "float32")):
        with T.Kernel(1, threads=THREADS):
            tile = T.alloc_shared((THREADS,), "float32")
            thread = T.get_thread_binding()
            tile[thread] = x[thread]
            x[thread] = tile[THREADS - 1 - thread]

    return program


def reads_before_the_bulk_copy(d: Dialect) -> Any:
    """A tile that a bulk copy (TMA) brings, read without waiting for it."""

    @T.prim_func
    def program(
        x: T.Tensor((THREADS, WIDTH), "float16"),
        y: T.Tensor((THREADS, WIDTH), "float16"),
    ):
        with T.Kernel(1, threads=THREADS):
            tile = T.alloc_shared((THREADS, WIDTH), "float16")
            full = T.alloc_barrier([32])
            thread = T.get_thread_binding()
            if thread < 32:
                T.tma_copy(x[0:THREADS, 0:WIDTH], tile, barrier=full[0])
                T.barrier_arrive(full[0])
            for i in T.serial(WIDTH):
                y[thread, i] = tile[thread, i]

    return program


writes_beyond.options = UNGUARDED
reads_before_the_barrier.options = UNSYNCHRONISED
reads_before_the_bulk_copy.options = UNSYNCHRONISED


@dataclass(frozen=True)
class Planted:
    """A program, the tool that must report it and by what text, its tensors' shapes and dtype."""

    program: Callable[[Dialect], Any]
    tool: str
    report: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    def run(self) -> None:
        """Launches it once on the GPU, and does not wait for it."""
        tensors = [torch.zeros(s, dtype=self.dtype, device="cuda") for s in self.shapes]
        launch(self.program, dialect_of(tensors[0]), (), *tensors)


HAZARD = "access at program_kernel"  # TileLang calls every kernel so

PLANTED = {
    planted.program.__name__: planted
    for planted in (
        Planted(writes_beyond, "memcheck", "Invalid __global__ write", ((THREADS - 1,),)),
        Planted(reads_before_the_barrier, "racecheck", HAZARD, ((THREADS,),)),
        Planted(
            reads_before_the_bulk_copy, "racecheck", HAZARD, ((THREADS, WIDTH),) * 2, torch.float16
        ),
    )
}  # fmt: skip
