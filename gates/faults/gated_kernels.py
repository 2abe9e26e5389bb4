"""Gated linear layers with exchanged weights, lost gradients or reused memory; and right ones."""

from __future__ import annotations

import torch

from gates.faults.kernels import matrix_product, rounded_products
from gates.faults.projections_kernels import sum_of_all
from gates.faults.swiglu_kernels import right_gradients, right_values
from harness import benign, fault

EXACT, MODEL = "m1_operators::test_gated_linear", "m1_model::test_values_and_gradients[decoder]"
GATED, RUNG = "m4_swiglu::test_gated", "m4_swiglu::test_models[gated_linear-rung]"
SUMS = "m4_swiglu::test_accumulation"
AGAIN = "m4_repeats::test_second_backward[gated_linear]"


def gated_kernel(slopes=right_gradients, dx=sum_of_all, product=matrix_product):
    """gate and up by product(x, weight^T); slopes(gate, up, dh) and dx(slopes, weights)."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gate_weight, up_weight):
            gate, up = product(x, gate_weight.mT), product(x, up_weight.mT)
            ctx.save_for_backward(x, gate_weight, up_weight, gate, up)
            return right_values(gate, up)

        @staticmethod
        def backward(ctx, dh):
            x, gate_weight, up_weight, gate, up = ctx.saved_tensors
            dgate, dup = slopes(gate, up, dh)
            return (
                dx((dgate, dup), (gate_weight, up_weight)),
                matrix_product(dgate.mT, x),
                matrix_product(dup.mT, x),
            )

    def gated_linear(x, gate_weight, up_weight):
        h = Kernel.apply(x.flatten(0, -2), gate_weight, up_weight)
        return h.unflatten(0, x.shape[:-1])

    return gated_linear


def over_what_was_saved(gate, up, dh):
    """The gradients, in the memory of gate and up."""
    dgate, dup = right_gradients(gate, up, dh)
    return gate.data.copy_(dgate), up.data.copy_(dup)


@fault(role="gated_linear", caught_by=[EXACT, MODEL, GATED, RUNG], seen_in="own")
def gates_by_the_up_projection(reference):
    """The halves of a fused weight are taken in the other order."""
    return lambda x, gate_weight, up_weight: reference.gated_linear(x, up_weight, gate_weight)


@fault(role="gated_linear", caught_by=SUMS, seen_in="tile-ai/tilelang PR#2917")
def rounds_each_product_before_the_gate(reference):
    """Products are rounded to the operands' dtype before they are added: 90000 is infinite."""
    return gated_kernel(product=rounded_products)


@fault(role="gated_linear", caught_by=[EXACT, GATED, RUNG], seen_in="unslothai/unsloth#3314")
def exchanges_the_slopes(reference):
    """dgate and dup change places before the products."""
    return gated_kernel(lambda *arguments: right_gradients(*arguments)[::-1])


@fault(role="gated_linear", caught_by=[EXACT, GATED, RUNG], seen_in="own")
def forgets_the_gate_in_dx(reference):
    """The second product of dx overwrites the first: beta is 0."""
    return gated_kernel(dx=lambda slopes, weights: sum_of_all(slopes[1:], weights[1:]))


@fault(
    role="gated_linear",
    caught_by=AGAIN,
    seen_in="linkedin/Liger-Kernel: LigerSiLUMulFunction stores gradients over gate and up",
)
def writes_over_what_another_backward_reads(reference):
    """Gradients take the memory of gate and up although the graph is kept."""
    return gated_kernel(over_what_was_saved)


EVERY_GATED_GATE = [
    GATED,
    SUMS,
    RUNG,
    AGAIN,
    "m4_memory::test_layouts[gated_linear]",
    "m4_memory::test_guards[gated_linear]",
    "m4_repeats::test_same_bits[gated_linear]",
    "m4_repeats::test_many_configurations[gated_linear]",
]


@benign(
    role="gated_linear",
    accepted_by=EVERY_GATED_GATE,
    because="nobody else reads gate and up once the graph is gone",
)
def reuses_gate_and_up_where_the_graph_is_not_kept(reference):
    """Gradients take the memory of gate and up in the last backward of the graph alone."""

    def slopes(gate, up, dh):
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return right_gradients(gate, up, dh)
        return over_what_was_saved(gate, up, dh)

    return gated_kernel(slopes)


@benign(
    role="gated_linear",
    accepted_by=EVERY_GATED_GATE,
    because="one product with both weights below one another",
)
def multiplies_once_by_both_weights(reference):
    """gate and up are the two halves of one product's columns."""

    def gated_linear(x, gate_weight, up_weight):
        both = reference.linear(x, torch.cat((gate_weight, up_weight)), None)
        return reference.swiglu(*both.chunk(2, dim=-1))

    return gated_linear
