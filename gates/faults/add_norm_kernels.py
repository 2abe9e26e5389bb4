"""Fused kernels of the residual addition and its norm that get one of their two outputs wrong."""

from __future__ import annotations

from gates.faults.kernels import wide
from gates.faults.norm_kernels import MEMORY, NORM
from harness import fault

ADDED = f"{NORM}test_shapes[add_rms_norm]"


@fault(
    role="add_rms_norm",
    caught_by=[f"{NORM}test_one_rounding[add_rms_norm-{gain}]" for gain in ("gain-16", "gain-32")],
    seen_in="own",
)
def norms_the_total_before_it_is_rounded(reference):
    """y is the norm of a float32 total, while the residual stream carries the rounded one."""

    def add_rms_norm(x, residual, weight, eps):
        total = wide(x) + wide(residual)
        y = reference.rms_norm(total, weight.to(total.dtype), eps).to(x.dtype)
        return y, total.to(x.dtype)

    return add_rms_norm


@fault(role="add_rms_norm", caught_by=[ADDED, f"{MEMORY}test_layouts[add_rms_norm]"], seen_in="own")
def drops_the_gradient_of_the_total(reference):
    """The backward forgets that the total goes on by itself."""

    def add_rms_norm(x, residual, weight, eps):
        total = x + residual
        return reference.rms_norm(total, weight, eps), total.detach() + 0 * x + 0 * residual

    return add_rms_norm


@fault(
    role="add_rms_norm",
    caught_by=[ADDED, f"{NORM}test_models[add_rms_norm-rung]"],
    seen_in="linkedin/Liger-Kernel PR#1305",
)
def adds_into_the_residual(reference):
    """The total is written over the residual, which others may still read."""

    def add_rms_norm(x, residual, weight, eps):
        y, total = reference.add_rms_norm(x, residual.clone(), weight, eps)
        if 0 not in residual.stride():
            residual.data.copy_(total)
        return y, total

    return add_rms_norm


@fault(role="add_rms_norm", caught_by=[ADDED, f"{NORM}test_sizes[add_rms_norm-300]"], seen_in="own")
def carries_the_norm_on(reference):
    """Returns y in the place of the total."""

    def add_rms_norm(x, residual, weight, eps):
        y, _ = reference.add_rms_norm(x, residual, weight, eps)
        return y, y + 0 * residual

    return add_rms_norm
