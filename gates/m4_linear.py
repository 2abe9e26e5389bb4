"""M4. Linear layers in every dtype: products of matrices, alone and of one input, and gradients."""

from __future__ import annotations

import pytest
import torch

from gates import ladder, operators, recorded
from gates.operator_cases import (
    linear_case,
    lost_by_rounding,
    normal,
    projections_case,
    with_large_products,
)
from gates.probes import REFERENCE
from harness import gate

# (rows, inputs, outputs) around tiles of 16 to 128 in each of the three; smaller than one tile of
# all (a grid with more workers than tiles), one element, primes.
SHAPES = [(1, 1, 1), (1, 64, 33), (15, 33, 64), (17, 64, 64), (64, 64, 33), (129, 64, 64)]
LARGE = [
    *((m, k, n) for m in (127, 128, 257) for k in (31, 128, 4096) for n in (127, 129, 256)),
    (1009, 1013, 1019),
    (4096, 896, 4864),
]

# (rows, inputs, the outputs of each): alone, alike, narrower and wider than the first.
SEVERAL = [
    (1, 1, (1,)), (17, 64, (64, 33, 33)), (37, 33, (17, 64)), (129, 64, (64, 64)),
    (64, 31, (1, 129, 16)),
]  # fmt: skip
SEVERAL_LARGE = [(1009, 1013, (1019, 256, 128)), (4096, 896, (4864, 4864))]


def layer_cases(rng, config):
    """The products of a layer: queries, keys, feed-forward up and down."""
    D, F = config.model_width, config.feed_forward_width
    widths = {(D, config.num_query_heads * config.head_width, config.qkv_bias),
              (D, config.num_kv_heads * config.head_width, config.qkv_bias),
              (D, F, False), (F, D, False)}  # fmt: skip
    return [linear_case(rng, 17, *shape) for shape in sorted(widths)]


def projection_cases(rng, config):
    """Of one input of a layer: queries, keys, values; gate and up."""
    D, F, H = config.model_width, config.feed_forward_width, config.head_width
    qkv = (config.num_query_heads * H, config.num_kv_heads * H, config.num_kv_heads * H)
    return [
        projections_case(rng, 17, D, qkv, config.qkv_bias),
        projections_case(rng, 17, D, (F, F), False),
    ]


CASES = {"linear": layer_cases, "projections": projection_cases}


@gate(
    claim="the product, with and without a bias, and its gradients are as near to the oracle as "
    "the plain formula, for sizes around every tile edge in all three dimensions",
    roles=["linear"],
    not_claimed="memory layouts (m4_memory), speed",
    source="tile-ai/tilelang-ascend#1551 (fewer tiles than workers), #1093 (float32 operands read "
    "as pairs of float16)",
)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_shapes(stack, bias, rng, device, check):
    for dtype in operators.dtypes(stack):
        for shape in SHAPES + (LARGE if device.type == "cuda" else []):
            case = linear_case(rng, *shape, bias=bias)
            operators.trial(stack, case, dtype, device, rng, check, at=str(list(shape)))


def product_as(which, role, stack, a, b):
    """a b^T as the layer's own output, its gradient by x or by the weight: all must be the same."""

    def layer(x, weight):
        if role == "projections":
            return stack.projections(x, [weight], [None])[0]
        return stack.linear(x, weight, None)

    if which == "y":
        return layer(a.requires_grad_(), b.requires_grad_()).detach()
    other = a.new_ones(len(a), len(b)).requires_grad_()
    b_t = b.mT.contiguous().requires_grad_()
    if which == "dx":
        return torch.autograd.grad(layer(other, b_t), other, a)[0]
    return torch.autograd.grad(layer(b_t, other), other, a.mT.contiguous())[0]


@gate(
    claim="the three products are added in float32: no product is rounded, and none is beyond the "
    "range of float16",
    roles=["linear", "projections"],
    not_claimed="sums beyond the range of the result's dtype",
    source="tile-ai/tilelang PR#2917: each product rounded to float16 was off by 1e-2 for 256 "
    "terms, and infinite for 300 * 300",
)
@pytest.mark.parametrize("which", ["y", "dx", "dweight"])
@pytest.mark.parametrize("role", ["linear", "projections"])
def test_accumulation(stack, role, which, rng, device, check):
    for dtype in operators.dtypes(stack):
        a = normal(rng, 16, 512).to(device, dtype)
        b = normal(rng, 33, 512, scale=512**-0.5).to(device, dtype)
        with_large_products(a, b)  # beside 508 of about 0.05
        oracle = a.cpu().double() @ b.cpu().double().mT
        error = (product_as(which, role, stack, a, b).cpu().double() - oracle).abs().max()
        check(f"{operators.short(dtype)}: largest error beside products of 90000", error,
              at_most=1.0, because="float32 keeps 2^-7 beside 180000, in each of up to 508 "
              "additions; float16 products are infinite, and their sum is NaN")  # fmt: skip
        if dtype != torch.bfloat16:
            continue
        a, b, exact = lost_by_rounding(16, 33, device)
        error = (product_as(which, role, stack, a, b).cpu().double() / exact - 1).abs()
        check("bfloat16: relative error of sums of what rounding a product would take away",
              error.max(), at_most=2**-7, because="float32 holds every partial sum, in any order; "
              "with rounded products they are 0")  # fmt: skip


@gate(
    claim="sums of many products of one sign are rounded once, in all three products",
    roles=["linear", "projections"],
    not_claimed="sums beyond the range of the result's dtype",
    source="tile-ai/tilelang PR#2917",
)
@pytest.mark.parametrize("which", ["y", "dx", "dweight"])
@pytest.mark.parametrize("role", ["linear", "projections"])
def test_one_sign(stack, role, which, rng, device, check):
    for dtype in operators.dtypes(stack):
        a = normal(rng, 16, 512).abs().to(device, dtype)
        b = normal(rng, 33, 512, scale=512**-0.5).abs().to(device, dtype)
        got = product_as(which, role, stack, a, b)
        plain = product_as(which, role, REFERENCE, a, b)
        oracle = a.cpu().double() @ b.cpu().double().mT
        results = (x.cpu() for x in (got, plain, oracle))
        operators.judge(check, f"{operators.short(dtype)} {which}", dtype, *results)


@gate(
    claim="several products of one input are each as near to the oracle as the plain formula, and "
    "so is the gradient of the input, which is the sum of theirs",
    roles=["projections"],
    not_claimed="memory layouts (m4_memory), speed",
    source="the projections to q, k, v and to gate, up of a decoder layer",
)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_several(stack, bias, rng, device, check):
    for dtype in operators.dtypes(stack):
        for shape in SEVERAL + (SEVERAL_LARGE if device.type == "cuda" else []):
            case = projections_case(rng, *shape, bias=bias)
            operators.trial(stack, case, dtype, device, rng, check, at=str(list(shape)))


@gate(
    claim="where one of several outputs is used, it and its gradients are those of linear, and the "
    "others' weights and biases get none",
    roles=["projections"],
    not_claimed="that nothing is computed for the unused",
    source="torch.autograd: gradients that nobody gave count as zeros",
)
@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_used(stack, used, rng, device, check):
    for dtype in operators.dtypes(stack):
        unused = [
            normal(rng, *shape).to(device, dtype).requires_grad_()
            for shape in ((33, 64), (17, 64), (33,), (17,))
        ]
        name = f"{operators.short(dtype)}: elements of gradients of the unused that are not 0"

        def linear(x, weight, bias, unused=unused, name=name):
            weights, biases = unused[:2], unused[2:]
            weights.insert(used, weight)
            biases.insert(used, bias)
            y = stack.projections(x, weights, biases)[used]
            given = torch.autograd.grad(y.sum(), unused, retain_graph=True, allow_unused=True)
            check(name, sum(int(g.count_nonzero()) for g in given if g is not None), equal=0,
                  because="they change nothing that is used")  # fmt: skip
            return y

        case = linear_case(rng, 17, 64, 33)
        operators.trial(stack.replace({"linear": linear}), case, dtype, device, rng, check)


@gate(
    claim="the same at the shapes of the rung's model, and for real activations and weights",
    roles=["linear", "projections"],
    not_claimed="the rung's number of tokens",
    source="the presets of reference.config",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
@pytest.mark.parametrize("role", CASES)
def test_models(stack, role, inputs, rung, rng, device, check):
    def rung_cases():
        return [x for c in ladder.operator_configs(rung) for x in CASES[role](rng, c)]

    recorded.trials(role, inputs, rung_cases, stack, rng, device, check)
