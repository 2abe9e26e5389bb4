"""Kernels of SwiGLU that are wrong at the end, in the backward or for large gates; right ones."""

from __future__ import annotations

import torch

from gates.faults.kernels import cut_tail, densely, wide
from harness import benign, fault

SWIGLU = "m4_swiglu::"
SHAPES = f"{SWIGLU}test_shapes"


def right_values(gate, up):
    z = wide(gate)
    return (z * torch.sigmoid(z) * wide(up)).to(gate.dtype)


def right_gradients(gate, up, dh):
    z, s = wide(gate), torch.sigmoid(wide(gate))
    dgate = wide(dh) * wide(up) * s * (1 + z * (1 - s))
    return dgate.to(gate.dtype), (wide(dh) * z * s).to(up.dtype)


def swiglu_kernel(values=right_values, gradients=right_gradients):
    """SwiGLU with its forward and its backward by hand."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return values(gate, up)

        @staticmethod
        def backward(ctx, dh):
            return gradients(*ctx.saved_tensors, dh)

    return Kernel.apply


@fault(
    role="swiglu",
    caught_by=[SHAPES, f"{SWIGLU}test_models[swiglu-rung]"],
    seen_in="unslothai/unsloth#3314",
)
def stores_each_gradient_in_the_other_s_buffer(reference):
    """dgate and dup change places."""
    return swiglu_kernel(gradients=lambda *arguments: right_gradients(*arguments)[::-1])


@fault(role="swiglu", caught_by=SHAPES, seen_in="unslothai/unsloth#3314")
def drops_the_slope_of_the_sigmoid(reference):
    """d silu is taken for sigmoid, without z sigmoid (1 - sigmoid)."""

    def gradients(gate, up, dh):
        _, dup = right_gradients(gate, up, dh)
        return (wide(dh) * wide(up) * torch.sigmoid(wide(gate))).to(gate.dtype), dup

    return swiglu_kernel(gradients=gradients)


@fault(role="swiglu", caught_by=SHAPES, seen_in="tile-ai/tilelang-ascend#1717")
def computes_whole_vectors_only(reference):
    """Elements after the last whole 32 are left at zero."""
    return swiglu_kernel(lambda gate, up: cut_tail(right_values(gate, up), 32))


@fault(role="swiglu", caught_by=SHAPES, seen_in="own")
def computes_whole_vectors_only_backward(reference):
    """The forward is right; gradients after the last whole 32 elements are left at zero."""

    def gradients(gate, up, dh):
        return tuple(cut_tail(x, 32) for x in right_gradients(gate, up, dh))

    return swiglu_kernel(gradients=gradients)


@fault(role="swiglu", caught_by=f"{SWIGLU}test_large_gates", seen_in="own")
def divides_exponentials(reference):
    """The derivative as exp(z) / (1 + exp(z))^2: infinity over infinity at 90."""

    def gradients(gate, up, dh):
        z, e = wide(gate), wide(gate).exp()
        _, dup = right_gradients(gate, up, dh)
        slope = e / (1 + e) + z * e / (1 + e).square()
        return (wide(dh) * wide(up) * slope).to(gate.dtype), dup

    return swiglu_kernel(gradients=gradients)


@fault(role="swiglu", caught_by=[SHAPES, f"{SWIGLU}test_models[swiglu-rung]"], seen_in="own")
def writes_gradients_over_the_inputs(reference):
    """Works in place: gate and up hold their gradients afterwards."""

    def gradients(gate, up, dh):
        dgate, dup = right_gradients(gate, up, dh)
        gate.data.copy_(dgate)
        return dgate, dup

    return swiglu_kernel(gradients=gradients)


@fault(role="swiglu", caught_by=SHAPES, seen_in="own")
def keeps_the_activation_in_8_bits(reference):
    """silu(gate) is saved in float8 for the backward."""

    def gradients(gate, up, dh):
        dgate, _ = right_gradients(gate, up, dh)
        z = wide(gate)
        kept = (z * torch.sigmoid(z)).to(torch.float8_e4m3fn).to(z.dtype)
        return dgate, (wide(dh) * kept).to(up.dtype)

    return swiglu_kernel(gradients=gradients)


@fault(role="swiglu", caught_by="m4_memory::test_layouts[swiglu]", seen_in="own")
def reads_the_halves_of_a_projection_as_dense(reference):
    """gate and up are views of one projection; the kernel ignores how far apart their rows are."""
    return swiglu_kernel(lambda gate, up: right_values(densely(gate), densely(up)))


@benign(
    role="swiglu",
    accepted_by=[
        SHAPES,
        f"{SWIGLU}test_large_gates",
        f"{SWIGLU}test_models[swiglu-rung]",
        "m4_memory::test_layouts[swiglu]",
        "m4_memory::test_guards[swiglu]",
        "m4_repeats::test_same_bits[swiglu]",
    ],
    because="sigmoid(z) is (1 + tanh(z / 2)) / 2, and the backward may compute it again",
)
def takes_a_tanh(reference):
    """The gate as a hyperbolic tangent, forward and backward by hand."""

    def sigmoid(z):
        return torch.where(z < 0, z.exp() / (1 + z.exp()), (1 + torch.tanh(z / 2)) / 2)

    def values(gate, up):
        z = wide(gate)
        return (z * sigmoid(z) * wide(up)).to(gate.dtype)

    return swiglu_kernel(values)
