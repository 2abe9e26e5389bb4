"""M4. SwiGLU in every dtype, alone and after its two products, at any size and shape."""

from __future__ import annotations

import pytest
import torch

from gates import ladder, operators, recorded
from gates.operator_cases import gated_case, lost_by_rounding, swiglu_case, with_large_products
from harness import gate

# Elements around the edges of blocks of 128, 256 and 1024, and primes; three dimensions as in a
# model, and one.
SHAPES = [(1, 1), (1, 64), (127, 1), (128, 3), (7, 17), (16, 64), (17, 64), (2, 9, 33), (1009,)]
LARGE = [(129, 1024), (4097, 96), (3, 5, 8960)]
# (rows, inputs, outputs) of the products before it.
GATED = [(1, 1, 1), (17, 64, 33), (37, 33, 64), (129, 64, 17)]
GATED_LARGE = [(1009, 1013, 1019), (4096, 896, 4864)]


@gate(
    claim="values and gradients are as near to the oracle as the plain formula, for numbers of "
    "elements around every tile edge",
    roles=["swiglu"],
    not_claimed="memory layouts (m4_memory), speed",
    source="unslothai/unsloth#3314: gradients exchanged, or one of them wrong",
)
def test_shapes(stack, rng, device, check):
    for dtype in operators.dtypes(stack):
        for shape in SHAPES + (LARGE if device.type == "cuda" else []):
            case = swiglu_case(rng, *shape)
            operators.trial(stack, case, dtype, device, rng, check, at=str(list(shape)))


@gate(
    claim="gates from -90 to 90, where exp(-gate) leaves the range of float16 and of float32, have "
    "finite values and gradients as near to the oracle as the plain formula",
    roles=["swiglu"],
    not_claimed="gates that are not finite",
    source="exp(89) is beyond float32, exp(12) beyond float16",
)
def test_large_gates(stack, rng, device, check):
    for dtype in operators.dtypes(stack):
        case = swiglu_case(rng, 16, 64)
        case.tensors["gate"][:] = torch.linspace(-90, 90, 16 * 64, dtype=torch.float64).view(16, 64)
        outcome = operators.trial(stack, case, dtype, device, rng, check)
        for name, x in (outcome.forward | outcome.backward).items():
            infinite = int((~x.isfinite()).sum())
            check(f"{operators.short(dtype)} {name}: elements that are not finite", infinite,
                  equal=0, because="silu and its derivative are bounded by the gate")  # fmt: skip


@gate(
    claim="a gated linear layer and its gradients by the input and both weights are as near to the "
    "oracle as the plain formula",
    roles=["gated_linear"],
    not_claimed="memory layouts (m4_memory), a graph that is kept (m4_repeats), speed",
    source="Shazeer 2020, equation 6; unslothai/unsloth#3314: gradients exchanged",
)
def test_gated(stack, rng, device, check):
    for dtype in operators.dtypes(stack):
        for shape in GATED + (GATED_LARGE if device.type == "cuda" else []):
            case = gated_case(rng, *shape)
            operators.trial(stack, case, dtype, device, rng, check, at=str(list(shape)))


@gate(
    claim="the two products before the gate are added in float32: no product is rounded, and none "
    "is beyond the range of float16",
    roles=["gated_linear"],
    not_claimed="the products of the gradients, whose operands are the gate's slopes",
    source="tile-ai/tilelang PR#2917: each product rounded to float16, and infinite for 300 * 300",
)
def test_accumulation(stack, rng, device, check):
    for dtype in operators.dtypes(stack):
        tensors = {n: t.to(device, dtype) for n, t in gated_case(rng, 16, 512, 33).tensors.items()}
        for weight in ("gate_weight", "up_weight"):
            with_large_products(tensors["x"], tensors[weight])
        infinite = int((~stack.gated_linear(*tensors.values()).isfinite()).sum())
        check(f"{operators.short(dtype)}: elements beside products of 90000 that are not finite",
              infinite, equal=0, because="they cancel; in float16 they are infinite")  # fmt: skip
        if dtype != torch.bfloat16:
            continue
        x, weight, exact = lost_by_rounding(16, 33, device)
        h = stack.gated_linear(x, weight, weight).cpu().double()
        product = torch.tensor(exact, dtype=torch.float64)
        oracle = torch.nn.functional.silu(product) * product
        check("bfloat16: relative error of what rounding a product would take away",
              ((h - oracle) / oracle).abs().max(), at_most=2**-6, because="two roundings; with "
              "rounded products it is 0")  # fmt: skip


@gate(
    claim="the same at the feed-forward width of the rung's model, and for real gates",
    roles=["swiglu", "gated_linear"],
    not_claimed="the rung's number of tokens",
    source="the presets of reference.config",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
@pytest.mark.parametrize("role", ["swiglu", "gated_linear"])
def test_models(stack, role, inputs, rung, rng, device, check):
    def case_of(config):
        if role == "swiglu":
            return swiglu_case(rng, 19, config.feed_forward_width)
        return gated_case(rng, 19, config.model_width, config.feed_forward_width)

    def rung_cases():
        return [case_of(config) for config in ladder.operator_configs(rung)]

    recorded.trials(role, inputs, rung_cases, stack, rng, device, check)
