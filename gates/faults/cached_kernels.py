"""Operators that keep stale kernels, or remember their past."""

from __future__ import annotations

import itertools
import os

import torch

from gates.faults.swiglu_kernels import right_values, swiglu_kernel
from harness import fault
from reference.ops import rms_norm

REPEATS = "m4_repeats::"
BITS, CONFIGURATIONS = f"{REPEATS}test_same_bits", f"{REPEATS}test_many_configurations"


def first_constant_wins(operator, place):
    """A cache of kernels by shapes and dtypes: the constant of the first call is compiled in."""
    constants: dict[tuple, object] = {}

    def called(*arguments):
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        key = tuple((tuple(x.shape), x.dtype) for x in tensors)
        kept = constants.setdefault(key, arguments[place])
        return operator(*arguments[:place], kept, *arguments[place + 1 :])

    return called


@fault(role="rms_norm", caught_by=f"{CONFIGURATIONS}[rms_norm]", seen_in="tile-ai/tilelang#1250")
def caches_a_kernel_without_its_epsilon(reference):
    """The kernel's key has the shapes and dtypes, not epsilon."""
    cached = first_constant_wins(reference.rms_norm, 2)
    return lambda x, weight, eps: cached(x, weight, eps)


def first_number_of_rows_wins(operator):
    """A cache of kernels by widths and dtypes: rows beyond the first call's number stay zero."""
    numbers: dict[tuple, int] = {}

    def called(x, *others):
        y = operator(x, *others)
        rows = y.flatten(0, -2)
        kept = numbers.setdefault((x.shape[-1], y.shape[-1], x.dtype), len(rows))
        return (rows * (torch.arange(len(rows), device=x.device) < kept)[:, None]).view_as(y)

    return called


@fault(role="rms_norm", caught_by=f"{CONFIGURATIONS}[rms_norm]", seen_in="tile-ai/tilelang#1250")
def caches_a_norm_without_its_number_of_rows(reference):
    """The kernel's key has the width and dtype; the number of rows is compiled in."""
    cached = first_number_of_rows_wins(reference.rms_norm)
    return lambda x, weight, eps: cached(x, weight, eps)


@fault(role="linear", caught_by=f"{CONFIGURATIONS}[linear]", seen_in="tile-ai/tilelang#1250")
def caches_a_product_without_its_number_of_rows(reference):
    """The kernel's key has both widths and the dtype; the number of rows is compiled in."""
    cached = first_number_of_rows_wins(reference.linear)
    return lambda x, weight, bias: cached(x, weight, bias)


@fault(
    role="add_rms_norm",
    caught_by=f"{CONFIGURATIONS}[add_rms_norm]",
    seen_in="tile-ai/tilelang#2791",
)
def caches_the_fused_kernel_without_its_epsilon(reference):
    """The same in the fused norm."""
    cached = first_constant_wins(reference.add_rms_norm, 3)
    return lambda x, residual, weight, eps: cached(x, residual, weight, eps)


@fault(role="rope", caught_by=f"{CONFIGURATIONS}[rope]", seen_in="tile-ai/tilelang PR#565")
def caches_tables_without_theta(reference):
    """Tables of the first theta serve every other."""
    cached = first_constant_wins(reference.rope, 3)
    return lambda q, k, positions, theta: cached(q, k, positions, theta)


@fault(role="linear", caught_by=f"{CONFIGURATIONS}[linear]", seen_in="tile-ai/tilelang#2662")
def caches_a_kernel_without_its_bias_flag(reference):
    """The kernel that was compiled with a bias serves calls without one."""
    biases: dict[tuple, torch.Tensor] = {}

    def linear(x, weight, bias):
        key = (tuple(x.shape), x.dtype)
        if bias is not None:
            biases[key] = bias.detach()
        return reference.linear(x, weight, biases.get(key) if bias is None else bias)

    return linear


@fault(
    role="rms_norm",
    caught_by=f"{REPEATS}test_second_process",
    seen_in="tile-ai/tilelang PR#1977",
)
def depends_on_the_process(reference):
    """A result that depends on the process, as a kernel under a key from `hash()` does."""
    return lambda x, weight, eps: rms_norm(x, weight, eps * (1 + os.getpid() % 997))


@fault(
    role="swiglu",
    caught_by=f"{REPEATS}test_checkpointing[swiglu]",
    seen_in="pytorch/torchtitan#1323",
)
def computes_otherwise_the_second_time(reference):
    """A second forward of the same call, as checkpointing makes it, saves other values."""
    forwards = itertools.count()

    def values(gate, up):
        return right_values(gate, up) if next(forwards) % 2 else right_values(gate + 1e-2, up)

    return swiglu_kernel(values)
