"""Projections of one input whose gradients are lost, counted twice or mixed up; and right ones."""

from __future__ import annotations

import torch

from gates.faults.kernels import matrix_product, narrow_sum, rounded_products, wide
from harness import benign, fault

LINEAR = "m4_linear::"
SEVERAL, FIRST_UNUSED = f"{LINEAR}test_several", [f"{LINEAR}test_one_used[{i}]" for i in (1, 2)]
RUNG = f"{LINEAR}test_models[projections-rung]"
PRODUCTS = ("y", "dx", "dweight")
SUMS = {name: f"{LINEAR}test_accumulation[projections-{name}]" for name in PRODUCTS}
ONE_SIGN = {name: f"{LINEAR}test_one_sign[projections-{name}]" for name in PRODUCTS}
EXACT = "m1_operators::test_projections"
MODEL = "m1_model::test_values_and_gradients[decoder]"
FROZEN = "m4_repeats::test_frozen[projections]"
LAYOUTS = "m4_memory::test_layouts[projections]"


def sum_of_all(dys, weights):
    """The gradient of the input in float32, rounded once."""
    total = sum(wide(dy) @ wide(weight) for dy, weight in zip(dys, weights, strict=True))
    return total.to(dys[0].dtype)


def dx_by(product):
    """The gradient of the input as a sum of product(dy, weight)."""
    return lambda dys, weights: sum(map(product, dys, weights))


def dweight_by(product):
    """The gradient of weight i as product(dy^T, x)."""
    return lambda dys, x, i: product(dys[i].mT, x)


right_dweight = dweight_by(matrix_product)


def projections_kernel(dx=sum_of_all, dweight=right_dweight, product=matrix_product):
    """Each output product(x, weight^T); dx(dys, weights), and dweight(dys, x, i) of each."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *weights):
            ctx.save_for_backward(x, *weights)
            return tuple(product(x, weight.mT) for weight in weights)

        @staticmethod
        def backward(ctx, *dys):
            x, *weights = ctx.saved_tensors
            return dx(dys, weights), *(dweight(dys, x, i) for i in range(len(dys)))

    def projections(x, weights, biases):
        outputs = Kernel.apply(x.flatten(0, -2), *weights)
        biased = (y if b is None else y + b for y, b in zip(outputs, biases, strict=True))
        return tuple(y.unflatten(0, x.shape[:-1]) for y in biased)

    return projections


@fault(role="projections", caught_by=[EXACT, SEVERAL, RUNG], seen_in="own")
def keeps_the_last_gradient_of_the_input(reference):
    """Each product writes dx where it should add to it: beta is 0."""
    return projections_kernel(lambda dys, weights: sum_of_all(dys[-1:], weights[-1:]))


@fault(role="projections", caught_by=[EXACT, SEVERAL, RUNG], seen_in="own")
def adds_the_first_gradient_twice(reference):
    """dx starts as the first product, and the loop over all adds it again."""

    def dx(dys, weights):
        return sum_of_all((dys[0], *dys), (weights[0], *weights))

    return projections_kernel(dx)


@fault(role="projections", caught_by=[SEVERAL, RUNG], seen_in="own")
def adds_up_dx_in_eight_bits_of_mantissa(reference):
    """The running sum of dx is stored as bfloat16 between the products, in float32 too."""

    def dx(dys, weights):
        total = torch.zeros((), dtype=torch.bfloat16, device=dys[0].device)
        for dy, weight in zip(dys, weights, strict=True):
            total = (total + wide(dy) @ wide(weight)).bfloat16()
        return total.to(dys[0].dtype)

    return projections_kernel(dx)


@fault(role="projections", caught_by=SEVERAL, seen_in="own")
def gives_every_output_the_width_of_the_first(reference):
    """A grouped product with one size for all: wider outputs are zero beyond it."""

    def projections(x, weights, biases):
        outputs, first = reference.projections(x, weights, biases), len(weights[0])
        columns = (torch.arange(len(weight), device=x.device) for weight in weights)
        return tuple(y * (c < first) for y, c in zip(outputs, columns, strict=True))

    return projections


@fault(role="projections", caught_by=SUMS["y"], seen_in="tile-ai/tilelang PR#2917")
def rounds_products_of_several_outputs(reference):
    """Products are rounded to the operands' dtype before they are added: 90000 is infinite."""
    return projections_kernel(product=rounded_products)


@fault(role="projections", caught_by=SUMS["dx"], seen_in="tile-ai/tilelang PR#2917")
def rounds_products_of_the_shared_dx(reference):
    """The products of dx are rounded to the operands' dtype before they are added."""
    return projections_kernel(dx_by(rounded_products))


@fault(role="projections", caught_by=SUMS["dweight"], seen_in="tile-ai/tilelang PR#2917")
def rounds_products_of_several_dweights(reference):
    """The products of dweight are rounded to the operands' dtype before they are added."""
    return projections_kernel(dweight=dweight_by(rounded_products))


@fault(role="projections", caught_by=ONE_SIGN["y"], seen_in="own")
def accumulates_outputs_in_16_bits(reference):
    """The sum of each output is kept in the dtype of the operands."""
    return projections_kernel(product=narrow_sum)


@fault(role="projections", caught_by=ONE_SIGN["dx"], seen_in="own")
def accumulates_the_shared_dx_in_16_bits(reference):
    """The sums of dx are kept in the dtype of the operands."""
    return projections_kernel(dx_by(narrow_sum))


@fault(role="projections", caught_by=ONE_SIGN["dweight"], seen_in="own")
def accumulates_dweights_in_16_bits(reference):
    """The sum of each dweight is kept in the dtype of the operands."""
    return projections_kernel(dweight=dweight_by(narrow_sum))


@fault(role="projections", caught_by=[EXACT, MODEL, SEVERAL, RUNG], seen_in="own")
def swaps_the_last_two(reference):
    """Keys are taken for values where both are as wide."""

    def projections(x, weights, biases):
        outputs = reference.projections(x, weights, biases)
        alike = len(outputs) > 1 and outputs[-2].shape == outputs[-1].shape
        return (*outputs[:-2], outputs[-1], outputs[-2]) if alike else outputs

    return projections


@fault(role="projections", caught_by=[f"{EXACT}[bias]", f"{SEVERAL}[bias]"], seen_in="own")
def adds_the_first_bias_alone(reference):
    """Only the first product has the epilogue with a bias."""

    def projections(x, weights, biases):
        return reference.projections(x, weights, [biases[0], *[None] * (len(biases) - 1)])

    return projections


@fault(role="projections", caught_by=[EXACT, SEVERAL, RUNG], seen_in="own")
def gives_every_weight_the_gradient_of_the_last(reference):
    """A loop variable read too late: every dweight has the last dy that fits."""

    def dweight(dys, x, i):
        fitting = [dy for dy in dys if dy.shape == dys[i].shape]
        return matrix_product(fitting[-1].mT, x)

    return projections_kernel(dweight=dweight)


@fault(role="projections", caught_by=FIRST_UNUSED, seen_in="own")
def gives_up_where_a_gradient_is_missing(reference):
    """A cotangent of zeros, as of an output that nothing uses, ends the sum of dx."""

    def dx(dys, weights):
        num = next((i for i, dy in enumerate(dys) if not dy.any()), len(dys))
        return sum_of_all(dys[: max(1, num)], weights[: max(1, num)])

    return projections_kernel(dx)


@fault(role="projections", caught_by=FROZEN, seen_in="own")
def ends_where_dx_is_not_wanted(reference):
    """A backward that begins with dx returns without it: the weights' gradients stay zero."""

    def projections(x, weights, biases):
        if not x.requires_grad:
            weights = [weight.detach() for weight in weights]
        return reference.projections(x, weights, biases)

    return projections


@fault(role="projections", caught_by=LAYOUTS, seen_in="linkedin/Liger-Kernel#370")
def adds_up_dx_in_the_first_cotangent(reference):
    """Where the shapes allow it, dx takes the memory of the first dy."""

    def dx(dys, weights):
        total = sum_of_all(dys, weights)
        return dys[0].data.copy_(total) if dys[0].shape == total.shape else total

    return projections_kernel(dx)


EVERY_PROJECTIONS_GATE = [
    *SUMS.values(),
    *ONE_SIGN.values(),
    SEVERAL,
    f"{LINEAR}test_one_used",
    RUNG,
    LAYOUTS,
    FROZEN,
    "m4_memory::test_guards[projections]",
    "m4_repeats::test_same_bits[projections]",
    "m4_repeats::test_many_configurations[projections]",
]


@benign(
    role="projections",
    accepted_by=EVERY_PROJECTIONS_GATE,
    because="one rounding of dx instead of one for each product and each sum",
)
def adds_up_dx_in_float32(reference):
    """The products of dx are added in float32 and rounded once."""
    return projections_kernel()


@benign(
    role="projections",
    accepted_by=EVERY_PROJECTIONS_GATE,
    because="torch's own product with an addend: it rounds after each",
)
def adds_each_product_to_dx(reference):
    """dx is the first product, and each further one adds to it what was rounded before."""

    def dx(dys, weights):
        total = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            total = torch.addmm(total, dy, weight)
        return total

    return projections_kernel(dx)


@benign(
    role="projections",
    accepted_by=EVERY_PROJECTIONS_GATE,
    because="outputs that are columns of one tensor are as good as others",
)
def multiplies_once_by_all_weights(reference):
    """One product with the weights below one another, whose columns are the outputs."""

    def projections(x, weights, biases):
        y = reference.linear(x, torch.cat(tuple(weights)), None)
        parts = y.split([len(weight) for weight in weights], dim=-1)
        return tuple(p if b is None else p + b for p, b in zip(parts, biases, strict=True))

    return projections
