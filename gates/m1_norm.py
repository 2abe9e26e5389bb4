"""M1. RMSNorm: epsilon inside the root, one rounding at the end, gradients in any layout."""

from __future__ import annotations

import pytest
import torch

from gates import toys
from harness import gate
from harness.compare import relative_error

EPSILON = 1e-6


def formula(x, weight, eps):
    """The formula in float64 on the CPU."""
    x, weight = x.cpu().double(), weight.cpu().double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def normal(stack, rng, device, *shape, dtype=None):
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    return x.to(device, dtype or toys.working_dtype(stack))


@gate(
    claim="the output is x / sqrt(mean(x^2) + eps) * weight, also where eps decides",
    roles=["rms_norm"],
    not_claimed="speed",
    source="Zhang and Sennrich 2019, equation 4; eps inside the root as in Qwen2",
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4], ids=["1", "0.001", "10000"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(stack, dtype, scale, rng, device, check):
    if dtype == torch.float64:
        dtype = toys.working_dtype(stack)
    x = normal(stack, rng, device, 5, 7, 33, dtype=dtype) * scale + scale / 2
    weight = normal(stack, rng, device, 33, dtype=dtype)
    want, x_before, weight_before = formula(x, weight, EPSILON), x.clone(), weight.clone()
    got = stack.rms_norm(x, weight, EPSILON)
    check("shape", list(got.shape), equal=list(x.shape), because="one output an input")
    check("dtype", str(got.dtype), equal=str(dtype), because="that of the input")
    check("relative error", relative_error(got, want),
          at_most=8 * torch.finfo(dtype).eps, because="four roundings; eps outside the root is "
          "0.1 % off at scale 1 and 45 % at 0.001")  # fmt: skip
    untouched = torch.equal(x, x_before) and torch.equal(weight, weight_before)
    check("inputs untouched", untouched, equal=True, because="others read x and weight after it")


@gate(
    claim="16-bit outputs are the exact values rounded once; a gain of 32 bits is not rounded",
    roles=["rms_norm"],
    not_claimed="the gradients of 16-bit inputs",
    source="google/gemma_pytorch PR#67 (the gain before the cast), ggml-org/llama.cpp PR#5810 (a "
    "gain of 1 + w formed in bfloat16)",
)
@pytest.mark.parametrize("gain", ["gain-16", "gain-32"])
def test_one_rounding(stack, gain, rng, device, check):
    dtype = toys.half_dtype(stack)
    x = normal(stack, rng, device, 256, 128, dtype=dtype)
    weight = 1 + normal(stack, rng, device, 128, dtype=torch.float32)
    weight = weight.to(dtype) if gain == "gain-16" else weight
    want = formula(x, weight, EPSILON).to(dtype)
    got = stack.rms_norm(x, weight, EPSILON)
    check("dtype", str(got.dtype), equal=str(dtype), because="that of the input")
    differing = (got.cpu() != want).double().mean()
    check("share of outputs that are not the nearest", differing, at_most=0.01,
          because="float32 crosses a tie in 1 of 1000; a second rounding moves 24 %")  # fmt: skip


@gate(
    claim="the gradients of input and gain are those of the formula, for contiguous, sliced, "
    "transposed and expanded inputs and cotangents, for an odd number of rows, next to a residual",
    roles=["rms_norm"],
    not_claimed="bitwise reproducible reductions",
    source="flagos-ai/FlagGems PR#1084 (strides of dy), linkedin/Liger-Kernel#370 (dx written into "
    "dy), BobMcDear/attorch#18 (the last block of rows lost)",
)
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed", "expanded"])
def test_gradient(stack, layout, rng, device, check):
    shape = (1009, 24)
    x = laid_out(normal(stack, rng, device, *shape), layout).requires_grad_()
    weight = normal(stack, rng, device, shape[1]).requires_grad_()
    dy = normal(stack, rng, device, *shape)
    dy = dy[:1].expand(shape) if layout == "expanded" else laid_out(dy, layout)
    kept = dy.cpu().double()
    oracle_x, oracle_weight = (p.detach().cpu().double().requires_grad_() for p in (x, weight))
    oracle = oracle_x + formula_graph(oracle_x, oracle_weight)
    want = torch.autograd.grad(oracle, (oracle_x, oracle_weight), kept)
    # A block x + norm(x): both branches need the same dy.
    got = torch.autograd.grad(x + stack.rms_norm(x, weight, EPSILON), (x, weight), dy)
    bound = toys.rounding(x.dtype)
    for name, gradient, oracle_gradient in zip(("x", "weight"), got, want, strict=True):
        check(f"relative error of d{name}", relative_error(gradient, oracle_gradient),
              at_most=bound, because="sums over 1009 rows in another order; one lost block of 8 "
              "rows is 3 %, a clobbered dy 27 %")  # fmt: skip


def formula_graph(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def laid_out(x, layout):
    """The same values in another memory layout."""
    if layout == "sliced":
        return torch.stack((x, torch.full_like(x, 7.0)), dim=-1).flatten(1)[:, ::2]
    if layout == "transposed":
        return x.T.contiguous().T
    return x.clone()


@gate(
    claim="a row of zeros gives zeros, with the finite gradient weight / sqrt(eps)",
    roles=["rms_norm"],
    not_claimed="rows that overflow",
    source="eps outside the root has no finite derivative at zero",
)
def test_zero_row(stack, rng, device, check):
    x = normal(stack, rng, device, 3, 8)
    x[1] = 0.0
    x.requires_grad_()
    weight = normal(stack, rng, device, 8)
    y = stack.rms_norm(x, weight, EPSILON)
    check("largest output of the zero row", y[1].abs().max(), equal=0.0, because="0 * gain")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    check("relative error of the gradient", relative_error(dx[1], weight / EPSILON**0.5),
          at_most=toys.rounding(x.dtype), because="1 / sqrt(0 + eps) = 1000")  # fmt: skip
