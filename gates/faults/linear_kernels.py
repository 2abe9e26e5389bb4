"""Matrix products that are wrong at a tile edge, in their accumulator or bias; and right ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gates.faults.kernels import densely, matrix_product, narrow_sum, rounded_products, wide
from harness import benign, fault

LINEAR = "m4_linear::"
SHAPES, PRODUCTS = f"{LINEAR}test_shapes", ("y", "dx", "dweight")
SUMS = {name: f"{LINEAR}test_accumulation[linear-{name}]" for name in PRODUCTS}
ONE_SIGN = {name: f"{LINEAR}test_one_sign[linear-{name}]" for name in PRODUCTS}
RUNG = f"{LINEAR}test_models[linear-rung]"


def of_rows(product):
    """product(a, b^T)."""
    return lambda a, b: product(a, b.mT)


product = of_rows(matrix_product)  # a b^T of matrices, in float32, rounded once


def linear_kernel(forward=product, dx=product, dweight=product, dbias=None):
    """y = x weight^T + bias from three products [rows, inner] x [columns, inner]."""
    total = dbias or (lambda dy: wide(dy).sum(0).to(dy.dtype))

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return forward(x, weight)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            return dx(dy, weight.mT), dweight(dy.mT, x.mT)

    class Bias(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, bias):
            return (wide(y) + wide(bias)).to(y.dtype)

        @staticmethod
        def backward(ctx, dy):
            return dy, total(dy)

    def linear(x, weight, bias):
        y = Kernel.apply(x.flatten(0, -2), weight)
        y = y if bias is None else Bias.apply(y, bias)
        return y.unflatten(0, x.shape[:-1])

    return linear


def in_whole_tiles(inner):
    """Inner elements after the last whole tile are dropped, unless there is but one tile."""
    return lambda a, b: product(*(m[:, : max(1, m.shape[1] // inner) * inner] for m in (a, b)))


@fault(role="linear", caught_by=[SHAPES, RUNG], seen_in="own")
def multiplies_in_tensor_float_32(reference):
    """float32 operands keep 10 bits."""

    def cut(x):
        if x.dtype != torch.float32:
            return x
        return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)

    return linear_kernel(lambda a, b: product(cut(a), cut(b)))


@fault(role="linear", caught_by=SUMS["y"], seen_in="tile-ai/tilelang PR#2917")
def rounds_each_product_to_16_bits(reference):
    """Products are rounded to the operands' dtype before they are added: 90000 is infinite."""
    return linear_kernel(of_rows(rounded_products))


@fault(role="linear", caught_by=SUMS["dx"], seen_in="tile-ai/tilelang PR#2917")
def rounds_each_product_of_dx_to_16_bits(reference):
    """The products of dx are rounded to the operands' dtype before they are added."""
    return linear_kernel(dx=of_rows(rounded_products))


@fault(role="linear", caught_by=SUMS["dweight"], seen_in="tile-ai/tilelang PR#2917")
def rounds_each_product_of_dweight_to_16_bits(reference):
    """The products of dweight are rounded to the operands' dtype before they are added."""
    return linear_kernel(dweight=of_rows(rounded_products))


@fault(role="linear", caught_by=ONE_SIGN["y"], seen_in="own")
def accumulates_in_16_bits(reference):
    """The sum is kept in the dtype of the operands."""
    return linear_kernel(of_rows(narrow_sum))


@fault(role="linear", caught_by=ONE_SIGN["dx"], seen_in="own")
def accumulates_dx_in_16_bits(reference):
    """The sum of dx is kept in the dtype of the operands."""
    return linear_kernel(dx=of_rows(narrow_sum))


@fault(role="linear", caught_by=ONE_SIGN["dweight"], seen_in="own")
def accumulates_dweight_in_16_bits(reference):
    """The sum of dweight is kept in the dtype of the operands."""
    return linear_kernel(dweight=of_rows(narrow_sum))


@fault(role="linear", caught_by=SHAPES, seen_in="own")
def drops_the_last_inner_elements(reference):
    """The inner loop takes whole tiles of 32: one element is lost of 33."""
    return linear_kernel(in_whole_tiles(32))


@fault(role="linear", caught_by=SHAPES, seen_in="own")
def drops_the_last_rows_of_dweight(reference):
    """The forward is right; dweight sums over whole tiles of 16 rows."""
    return linear_kernel(dweight=in_whole_tiles(16))


@fault(role="linear", caught_by=SHAPES, seen_in="tile-ai/tilelang-ascend#1551")
def leaves_idle_workers_to_write(reference):
    """With fewer tiles than workers the idle ones write zeros over the first tile."""

    def forward(a, b):
        y = product(a, b)
        if len(a) <= 16 and len(b) <= 64:
            y[:16, :16] = 0
        return y

    return linear_kernel(forward)


@fault(role="linear", caught_by=[SHAPES, RUNG], seen_in="tile-ai/tilelang-ascend#1093")
def reads_float32_as_pairs_of_16_bits(reference):
    """float32 operands are loaded as bfloat16 and lose their low halves."""

    def cut(x):
        return x.bfloat16().to(x.dtype) if x.dtype == torch.float32 else x

    return linear_kernel(dx=lambda a, b: product(cut(a), cut(b)))


@fault(role="linear", caught_by=f"{SHAPES}[bias]", seen_in="own")
def adds_the_bias_once_for_each_split(reference):
    """Two halves of the inner dimension both add it."""

    def linear(x, weight, bias):
        return reference.linear(x, weight, None if bias is None else 2 * bias)

    return linear


@fault(role="linear", caught_by=f"{SHAPES}[bias]", seen_in="BobMcDear/attorch#18")
def sums_whole_blocks_of_dbias(reference):
    """dbias sums rows // 8 blocks."""
    return linear_kernel(dbias=lambda dy: wide(dy)[: len(dy) // 8 * 8].sum(0).to(dy.dtype))


@fault(
    role="linear", caught_by="m4_memory::test_layouts[linear]", seen_in="flagos-ai/FlagGems PR#1084"
)
def reads_dy_as_dense_for_dweight(reference):
    """dweight takes dy for contiguous."""
    return linear_kernel(dweight=lambda a, b: product(densely(a.mT).mT, b))


EVERY_LINEAR_GATE = [
    SHAPES,
    *SUMS.values(),
    *ONE_SIGN.values(),
    RUNG,
    "m4_memory::test_layouts[linear]",
    "m4_memory::test_guards[linear]",
    "m4_repeats::test_same_bits[linear]",
    "m4_repeats::test_many_configurations[linear]",
]


@benign(role="linear", accepted_by=EVERY_LINEAR_GATE, because="float32 sums of 64 products each")
def adds_up_tiles_of_the_inner_dimension(reference):
    """A serial sum over tiles of 64 inner elements, in all three products."""

    def tiles(a, b):
        total = torch.zeros(len(a), len(b), dtype=wide(a).dtype, device=a.device)
        for k in range(0, a.shape[1], 64):
            total = total + wide(a[:, k : k + 64]) @ wide(b[:, k : k + 64]).mT
        return total.to(a.dtype)

    return linear_kernel(tiles, tiles, tiles)


@benign(
    role="linear",
    accepted_by=EVERY_LINEAR_GATE,
    because="the bias joins the sum before the rounding",
)
def adds_the_bias_in_float32(reference):
    """Product and bias in float32, rounded once."""

    def linear(x, weight, bias):
        return F.linear(wide(x), wide(weight), None if bias is None else wide(bias)).to(x.dtype)

    return linear
