"""SwiGLU, forward and backward: element by element, bound by the memory's bandwidth.

h = silu(g) u with silu(z) = z s and s = 1 / (1 + exp(-z)), in float32, rounded once. The backward
is du = dh g s and dg = dh u s (1 + g (1 - s)); it keeps g and u, and computes s again. Source:
Shazeer 2020, equation 6.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from candidates.tilelang.dialect import (
    NAMESPACE,
    Dialect,
    dense,
    dialect_of,
    dtype_name,
    launch,
    launches_of,
    line_of,
)

THREADS = 256  # of a block
LINES_PER_THREAD = 1  # of 16 bytes from each input: more did not help (0.98 to 1.02 of copy)
CPU_LINES = 256


def _lines(d: Dialect) -> int:
    return THREADS * LINES_PER_THREAD if d.on_gpu else CPU_LINES


def swiglu_forward(d: Dialect, line: int, dtype: str) -> Any:
    """h [num_lines, line] of gate and up, which are the flat tensors cut into short lines."""
    lines = _lines(d)
    num_lines = T.dynamic("num_lines")

    @T.prim_func
    def program(
        gate: T.Tensor((num_lines, line), dtype),
        up: T.Tensor((num_lines, line), dtype),
        h: T.Tensor((num_lines, line), dtype),
    ):
        with d.grid(T.ceildiv(num_lines, lines), num_threads=THREADS) as block:
            first = block * lines
            g = d.registers((lines, line), dtype)
            u = d.registers((lines, line), dtype)
            T.copy(gate[first : first + lines, 0:line], g)
            T.copy(up[first : first + lines, 0:line], u)
            for i, j in d.each(lines, line):
                z = T.cast(g[i, j], "float32")
                g[i, j] = T.cast(z / (1.0 + T.exp(-z)) * T.cast(u[i, j], "float32"), dtype)
            T.copy(g, h[first : first + lines, 0:line])

    return program


def swiglu_backward(d: Dialect, line: int, dtype: str) -> Any:
    """dgate and dup [num_lines, line]."""
    lines = _lines(d)
    num_lines = T.dynamic("num_lines")

    @T.prim_func
    def program(
        dh: T.Tensor((num_lines, line), dtype),
        gate: T.Tensor((num_lines, line), dtype),
        up: T.Tensor((num_lines, line), dtype),
        dgate: T.Tensor((num_lines, line), dtype),
        dup: T.Tensor((num_lines, line), dtype),
    ):
        with d.grid(T.ceildiv(num_lines, lines), num_threads=THREADS) as block:
            first = block * lines
            g = d.registers((lines, line), dtype)
            u = d.registers((lines, line), dtype)
            c = d.registers((lines, line), dtype)
            T.copy(dh[first : first + lines, 0:line], c)
            T.copy(gate[first : first + lines, 0:line], g)
            T.copy(up[first : first + lines, 0:line], u)
            for i, j in d.each(lines, line):
                z = T.cast(g[i, j], "float32")
                cotangent = T.cast(c[i, j], "float32")
                sigmoid = 1.0 / (1.0 + T.exp(-z))
                slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
                g[i, j] = T.cast(cotangent * T.cast(u[i, j], "float32") * slope, dtype)
                u[i, j] = T.cast(cotangent * z * sigmoid, dtype)
            T.copy(g, dgate[first : first + lines, 0:line])
            T.copy(u, dup[first : first + lines, 0:line])

    return program


def _launch(program: Any, *tensors: Tensor) -> None:
    """Runs a program on dense tensors of one size, cut into lines of one load each."""
    if tensors[0].numel():
        line = line_of(tensors[0])
        parameters = (line, dtype_name("swiglu", tensors[0]))
        launch(program, dialect_of(tensors[0]), parameters, *(x.view(-1, line) for x in tensors))


@torch.library.custom_op(f"{NAMESPACE}::swiglu", mutates_args=())
def swiglu_values(gate: Tensor, up: Tensor) -> Tensor:
    """h, contiguous."""
    h = gate.new_empty(gate.shape)
    _launch(swiglu_forward, dense(gate), dense(up), h)
    return h


@swiglu_values.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op(f"{NAMESPACE}::swiglu_backward", mutates_args=())
def swiglu_slopes(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup, contiguous."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _launch(swiglu_backward, dense(dh), dense(gate), dense(up), dgate, dup)
    return dgate, dup


@swiglu_slopes.register_fake
def _(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@torch.library.custom_op(f"{NAMESPACE}::swiglu_backward_", mutates_args=("gate", "up"))
def swiglu_slopes_in_place(dh: Tensor, gate: Tensor, up: Tensor) -> None:
    """The same, and dense gate and up take the results."""
    _launch(swiglu_backward, dense(dh), gate, up, gate, up)


@swiglu_slopes_in_place.register_fake
def _(dh: Tensor, gate: Tensor, up: Tensor) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = swiglu_slopes(dh, *ctx.saved_tensors)
    return dgate, dup


swiglu_values.register_autograd(_differentiate, setup_context=_keep)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """h [..., F] = silu(gate) * up in gate's dtype, with silu(z) = z / (1 + exp(-z)).

    gate and up share shape, dtype and device. Sizes that are not a multiple of 16 bytes are loaded
    an element at a time. Raises ValueError if gate and up differ, or the device does not take the
    dtype.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(
            f"gate and up must be alike, got {gate.dtype} {list(gate.shape)} on {gate.device} and "
            f"{up.dtype} {list(up.shape)} on {up.device}"
        )
    dtype_name("swiglu", gate)
    h: Tensor = swiglu_values(gate, up)
    return h


swiglu.kernel_calls = launches_of("swiglu_forward", "swiglu_backward")
