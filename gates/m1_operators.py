"""M1. SwiGLU and linear layers have the values and gradients of their formulas."""

from __future__ import annotations

import pytest
import torch

from gates import toys
from harness import gate
from harness.compare import relative_error


def normal(stack, rng, device, *shape):
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    return x.to(device, toys.working_dtype(stack))


def check_against(formula, operator, inputs, names, rng, check):
    """Values and gradients of operator(*inputs) against the formula in float64 on the CPU."""
    inputs = [x.requires_grad_() for x in inputs]
    oracle_inputs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    want, before = formula(*oracle_inputs), [x.detach().clone() for x in inputs]
    got = operator(*inputs)
    untouched = all(map(torch.equal, inputs, before))
    check("inputs untouched", untouched, equal=True, because="others read them after it")
    check("shape", list(got.shape), equal=list(want.shape), because="that of the formula")
    check("dtype", str(got.dtype), equal=str(inputs[0].dtype), because="that of the input")
    bound, because = toys.rounding(got.dtype), "another order of the same sums"
    check("relative error", relative_error(got, want), at_most=bound, because=because)
    cotangent = torch.randn(want.shape, generator=rng, dtype=torch.float64)
    gradients = torch.autograd.grad(got, inputs, cotangent.to(got))
    oracle_gradients = torch.autograd.grad(want, oracle_inputs, cotangent)
    for name, gradient, oracle in zip(names, gradients, oracle_gradients, strict=True):
        check(f"relative error of d{name}", relative_error(gradient, oracle), at_most=bound,
              because=because)  # fmt: skip


@gate(
    claim="swiglu is gate / (1 + exp(-gate)) * up, with the gradients of both",
    roles=["swiglu"],
    not_claimed="16-bit inputs",
    source="Shazeer 2020, equation 6; unslothai/unsloth#3314: the two gradients exchanged",
)
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["1", "30"])
def test_swiglu(stack, scale, rng, device, check):
    inputs = [scale * normal(stack, rng, device, 3, 5, 37) for _ in range(2)]

    def formula(gate, up):
        return gate / (1 + torch.exp(-gate)) * up

    check_against(formula, stack.swiglu, inputs, ("gate", "up"), rng, check)


@gate(
    claim="linear is x weight^T + bias, with the gradients of all three",
    roles=["linear"],
    not_claimed="16-bit inputs",
    source="the layout [out, in] of torch.nn.Linear and of checkpoints",
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_linear(stack, with_bias, rng, device, check):
    x, weight = normal(stack, rng, device, 3, 5, 37), normal(stack, rng, device, 37, 37)
    inputs = [x, weight, normal(stack, rng, device, 37)] if with_bias else [x, weight]

    def operator(x, weight, bias=None):
        return stack.linear(x, weight, bias)

    def formula(x, weight, bias=0.0):
        return torch.einsum("bti,oi->bto", x, weight) + bias

    check_against(formula, operator, inputs, ("x", "weight", "bias")[: len(inputs)], rng, check)


@gate(
    claim="projections are x weight_i^T + bias_i, and dx is the sum over them",
    roles=["projections"],
    not_claimed="16-bit inputs",
    source="torch.nn.Linear, several times with one input",
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_projections(stack, with_bias, rng, device, check):
    shapes = [(37, 37), (5, 37), (5, 37)]
    weights = [normal(stack, rng, device, *shape) for shape in shapes]
    biases = [normal(stack, rng, device, len(weight)) for weight in weights if with_bias]
    inputs = [normal(stack, rng, device, 3, 5, 37), *weights, *biases]

    def operator(x, *parameters):
        biases = parameters[3:] or (None, None, None)
        return torch.cat(stack.projections(x, parameters[:3], biases), dim=-1)

    def formula(x, *parameters):
        weight, bias = torch.cat(parameters[:3]), torch.cat(parameters[3:] or (torch.zeros(47),))
        return torch.einsum("bti,oi->bto", x, weight) + bias

    names = ["x", "weight0", "weight1", "weight2", "bias0", "bias1", "bias2"]
    check_against(formula, operator, inputs, names[: len(inputs)], rng, check)


@gate(
    claim="gated_linear is swiglu of two products, with the gradients of input and weights",
    roles=["gated_linear"],
    not_claimed="16-bit inputs",
    source="Shazeer 2020, equation 6",
)
def test_gated_linear(stack, rng, device, check):
    shapes = {"x": (3, 5, 37), "gate_weight": (17, 37), "up_weight": (17, 37)}
    inputs = [normal(stack, rng, device, *shape) for shape in shapes.values()]

    def formula(x, gate_weight, up_weight):
        gate, up = (torch.einsum("bti,oi->bto", x, w) for w in (gate_weight, up_weight))
        return gate / (1 + torch.exp(-gate)) * up

    check_against(formula, stack.gated_linear, inputs, shapes, rng, check)
