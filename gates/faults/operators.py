"""Wrong RMSNorm, SwiGLU and linear, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from harness import fault

NORM, OPERATORS = "m1_norm::", "m1_operators::"
SMALL = [f"{NORM}test_values[torch.float64-0.001]", f"{NORM}test_values[torch.float32-0.001]"]
EVERY_GRADIENT = f"{NORM}test_gradient"


def normalized(x, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class Norm(torch.autograd.Function):
    """RMSNorm with its backward by hand, so that a fault can be put into it."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return normalized(x, eps) * weight

    @staticmethod
    def gradients(ctx, dy):
        x, weight = ctx.saved_tensors
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        g = dy * weight
        dx = inverse * g - x * inverse**3 * (g * x).mean(-1, keepdim=True)
        return dx, dy * x * inverse


@fault(role="rms_norm", caught_by=[*SMALL, f"{NORM}test_zero_row"], seen_in="own")
def adds_epsilon_outside_the_root(reference):
    """x / (sqrt(mean x^2) + eps): 45 % off at inputs of 0.001, no gradient at zero."""

    def rms_norm(x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)

    return rms_norm


@fault(
    role="rms_norm",
    caught_by=[
        *SMALL,
        f"{NORM}test_zero_row",
        "m1_one_step::test_one_update[rung-own]",
        "m1_one_step::test_one_update[rung-bfloat16]",
    ],
    seen_in="own",
)
def forgets_epsilon(reference):
    """Divides a row of zeros by zero."""
    return lambda x, weight, eps: reference.rms_norm(x, weight, 0.0)


@fault(role="rms_norm", caught_by=f"{NORM}test_one_rounding", seen_in="google/gemma_pytorch PR#67")
def rounds_before_the_gain(reference):
    """Casts to 16 bits, then multiplies by the gain: two roundings."""
    return lambda x, weight, eps: normalized(x, eps).to(x.dtype) * weight.to(x.dtype)


@fault(
    role="rms_norm",
    caught_by=f"{NORM}test_one_rounding[gain-32]",
    seen_in="ggml-org/llama.cpp PR#5810",
)
def forms_the_gain_in_16_bits(reference):
    """Keeps w and forms 1 + w in the dtype of the input."""

    def rms_norm(x, weight, eps):
        gain = 1 + (weight - 1).to(x.dtype)
        return reference.rms_norm(x, gain, eps)

    return rms_norm


@fault(
    role="rms_norm",
    caught_by=[
        f"{NORM}test_values",
        EVERY_GRADIENT,
        "m1_model::test_values_and_gradients[decoder]",
    ],
    seen_in="linkedin/Liger-Kernel#74",
)
def multiplies_by_one_plus_the_gain(reference):
    """Takes the stored gain for the w of 1 + w."""
    return lambda x, weight, eps: reference.rms_norm(x, 1 + weight, eps)


@fault(
    role="rms_norm",
    caught_by=[
        f"{NORM}test_values",
        EVERY_GRADIENT,
        "m1_model::test_values_and_gradients[decoder]",
    ],
    seen_in="own",
)
def subtracts_the_mean(reference):
    """LayerNorm without a bias."""
    return lambda x, weight, eps: reference.rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


@fault(
    role="rms_norm",
    caught_by=[
        f"{EVERY_GRADIENT}[contiguous]",
        "m1_initialization::test_every_parameter_has_a_gradient[decoder-own]",
        "m1_initialization::test_every_parameter_has_a_gradient[decoder-bfloat16]",
        "m1_model::test_values_and_gradients[decoder]",
    ],
    seen_in="huggingface/candle#2168",
)
def has_a_fast_path_without_a_backward(reference):
    """Contiguous inputs take a path that is not differentiated."""

    def rms_norm(x, weight, eps):
        return reference.rms_norm(x.detach() if x.is_contiguous() else x, weight, eps)

    return rms_norm


@fault(
    role="rms_norm",
    caught_by=[f"{EVERY_GRADIENT}[{name}]" for name in ("contiguous", "sliced", "transposed")],
    seen_in="linkedin/Liger-Kernel#370",
)
def writes_dx_into_dy(reference):
    """The backward reuses the memory of dy, which the residual branch still needs."""

    class Clobbering(Norm):
        @staticmethod
        def backward(ctx, dy):
            dx, dweight = Norm.gradients(ctx, dy)
            return dy.copy_(dx), dweight.flatten(0, -2).sum(0), None

    return Clobbering.apply


@fault(
    role="rms_norm",
    caught_by=[f"{EVERY_GRADIENT}[{name}]" for name in ("sliced", "transposed", "expanded")],
    seen_in="flagos-ai/FlagGems PR#1084",
)
def reads_dy_as_if_contiguous(reference):
    """The backward ignores the strides of dy."""

    class Dense(Norm):
        @staticmethod
        def backward(ctx, dy):
            strides = torch.empty(dy.shape, device="meta").stride()
            dx, dweight = Norm.gradients(ctx, dy.as_strided(dy.shape, strides))
            return dx, dweight.flatten(0, -2).sum(0), None

    return Dense.apply


@fault(role="rms_norm", caught_by=EVERY_GRADIENT, seen_in="BobMcDear/attorch#18")
def loses_the_last_block_of_rows(reference):
    """Partial sums of the gain's gradient: rows // 8 of them, so 1009 rows lose one."""

    class Flooring(Norm):
        @staticmethod
        def backward(ctx, dy):
            dx, dweight = Norm.gradients(ctx, dy)
            rows = dweight.flatten(0, -2)
            return dx, rows[: len(rows) // 8 * 8].sum(0), None

    return Flooring.apply


@fault(
    role="swiglu",
    caught_by=[f"{OPERATORS}test_swiglu", "m1_model::test_values_and_gradients[decoder]"],
    seen_in="own",
)
def exchanges_gate_and_up(reference):
    """silu(up) * gate."""
    return lambda gate, up: reference.swiglu(up, gate)


@fault(role="swiglu", caught_by=f"{OPERATORS}test_swiglu", seen_in="own")
def gates_with_a_gelu(reference):
    """GeGLU: another activation of nearly the same shape."""
    return lambda gate, up: F.gelu(gate) * up


class SwiGLU(torch.autograd.Function):
    """SwiGLU with its backward by hand, so that a fault can be put into it."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up


@fault(role="swiglu", caught_by=f"{OPERATORS}test_swiglu", seen_in="unslothai/unsloth#3314")
def exchanges_the_gradients(reference):
    """The forward is right; dgate and dup are stored in each other's place."""

    class Exchanging(SwiGLU):
        @staticmethod
        def backward(ctx, dh):
            gate, up = ctx.saved_tensors
            sigmoid = gate.sigmoid()
            dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
            return dh * F.silu(gate), dgate

    return Exchanging.apply


@fault(role="swiglu", caught_by=f"{OPERATORS}test_swiglu", seen_in="unslothai/unsloth#3314")
def drops_a_term_of_the_derivative(reference):
    """Takes sigmoid for the derivative of silu, without gate * sigmoid * (1 - sigmoid)."""

    class Dropping(SwiGLU):
        @staticmethod
        def backward(ctx, dh):
            gate, up = ctx.saved_tensors
            return dh * up * gate.sigmoid(), dh * F.silu(gate)

    return Dropping.apply


@fault(role="linear", caught_by=f"{OPERATORS}test_linear", seen_in="own")
def multiplies_by_the_weight_itself(reference):
    """x weight instead of x weight^T, which a square matrix allows."""
    return lambda x, weight, bias: reference.linear(x, weight.mT, bias)


@fault(role="linear", caught_by=f"{OPERATORS}test_linear[bias]", seen_in="own")
def drops_the_bias(reference):
    """A fused path that takes no bias."""
    return lambda x, weight, bias: reference.linear(x, weight, None if bias is None else 0 * bias)


# --- inputs as scratch space -------------------------------------------------------------------


@fault(role="rms_norm", caught_by=f"{NORM}test_values", seen_in="own")
def keeps_the_square_in_the_input(reference):
    """Right values, but the input is scratch space and holds x^2 afterwards."""

    def rms_norm(x, weight, eps):
        y = reference.rms_norm(x.clone(), weight, eps)
        x.data.square_()
        return y

    return rms_norm


@fault(role="swiglu", caught_by=f"{OPERATORS}test_swiglu", seen_in="own")
def writes_over_the_up_projection(reference):
    """Right values, but they are also written where the up projection stood."""

    def swiglu(gate, up):
        h = reference.swiglu(gate.clone(), up.clone())
        up.data.copy_(h.detach())
        return h

    return swiglu
