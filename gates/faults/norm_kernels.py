"""Kernels of RMSNorm that are wrong at an edge, in a dtype, in a layout or in their scratch."""

from __future__ import annotations

import torch

from gates.faults.kernels import densely, padded_tile, warp_garbage, wide, writes_beyond
from harness import fault

NORM, MEMORY = "m4_rms_norm::", "m4_memory::"
SHAPES = f"{NORM}test_shapes[rms_norm]"


def inverse_rms(x, eps):
    return torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def right_values(x, weight, eps):
    return (wide(x) * inverse_rms(x, eps) * wide(weight)).to(x.dtype)


def parts_of(x, weight, eps, dy):
    """dx in float32, and every row's part of dweight."""
    r, g = inverse_rms(x, eps), wide(dy) * wide(weight)
    n = wide(x) * r
    return r * (g - n * (g * n).mean(-1, keepdim=True)), (wide(dy) * n).flatten(0, -2)


def right_gradients(x, weight, eps, dy):
    dx, rows = parts_of(x, weight, eps, dy)
    return dx.to(x.dtype), rows.sum(0).to(weight.dtype)


def norm_kernel(values=right_values, gradients=right_gradients):
    """RMSNorm with its forward and its backward by hand."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight)
            ctx.eps = eps
            return values(x, weight, eps)

        @staticmethod
        def backward(ctx, dy):
            return *gradients(*ctx.saved_tensors, ctx.eps, dy), None

    return Kernel.apply


# --- forward -------------------------------------------------------------------------------------


@fault(role="rms_norm", caught_by=f"{NORM}test_sizes[rms_norm-300]", seen_in="own")
def squares_in_the_dtype_of_the_input(reference):
    """Squares in 16 bits: 300 squared is infinite in float16."""

    def values(x, weight, eps):
        r = torch.rsqrt(wide(x * x).mean(-1, keepdim=True) + eps)
        return (wide(x) * r * wide(weight)).to(x.dtype)

    return norm_kernel(values)


@fault(
    role="rms_norm",
    caught_by=[SHAPES, f"{NORM}test_models[rms_norm-rung]"],
    seen_in="tile-ai/tilelang-ascend#1225",
)
def approximates_the_inverse_root(reference):
    """A root of 8 bits, as hardware gives before its refinement."""

    def values(x, weight, eps):
        r = inverse_rms(x, eps).to(torch.bfloat16).to(wide(x).dtype)
        return (wide(x) * r * wide(weight)).to(x.dtype)

    return norm_kernel(values)


@fault(
    role="rms_norm",
    caught_by=f"{NORM}test_models[rms_norm-recorded]",
    seen_in="NVIDIA/TransformerEngine#3216",
)
def cuts_off_outlying_channels(reference):
    """Inputs beyond 32 are 32, as in a format of few bits: random rows of scale 1 have none."""
    return norm_kernel(lambda x, weight, eps: right_values(x.clamp(-32, 32), weight, eps))


@fault(role="rms_norm", caught_by=SHAPES, seen_in="tile-ai/tilelang#2599")
def reduces_over_whole_warps(reference):
    """Lanes beyond the width hold what was there before: wrong for widths that no 32 divides."""

    def values(x, weight, eps):
        lanes = warp_garbage(wide(x))
        r = torch.rsqrt(lanes.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        return (wide(x) * r * wide(weight)).to(x.dtype)

    return norm_kernel(values)


@fault(
    role="rms_norm",
    caught_by=[SHAPES, f"{NORM}test_one_rounding[rms_norm-gain-16]"],
    seen_in="own",
)
def cuts_off_the_last_bits(reference):
    """Rounds 16-bit outputs towards zero."""

    def values(x, weight, eps):
        exact = wide(x) * inverse_rms(x, eps) * wide(weight)
        y = exact.to(x.dtype)
        too_large = wide(y).abs() > exact.abs()
        return torch.where(too_large, torch.nextafter(y, torch.zeros_like(y)), y)

    return norm_kernel(values)


@fault(
    role="rms_norm",
    caught_by=f"{NORM}test_one_rounding[rms_norm-gain-32]",
    seen_in="ggml-org/llama.cpp PR#5810",
)
def loads_the_gain_in_the_input_s_dtype(reference):
    """A gain of 32 bits passes through 16."""
    return norm_kernel(lambda x, weight, eps: right_values(x, weight.to(x.dtype), eps))


@fault(
    role="rms_norm",
    caught_by=f"{NORM}test_one_rounding[rms_norm-gain-16]",
    seen_in="vllm-project/vllm PR#3653",
)
def rounds_before_and_after_the_gain(reference):
    """Two roundings: Llama's order where Gemma's was promised."""

    def values(x, weight, eps):
        return (wide((wide(x) * inverse_rms(x, eps)).to(x.dtype)) * wide(weight)).to(x.dtype)

    return norm_kernel(values)


# --- backward ------------------------------------------------------------------------------------


@fault(role="rms_norm", caught_by=SHAPES, seen_in="BobMcDear/attorch#18")
def sizes_partial_sums_by_rounding_down(reference):
    """rows // 16 partial sums: the last rows are lost where 16 does not divide them."""

    def gradients(x, weight, eps, dy):
        dx, rows = parts_of(x, weight, eps, dy)
        return dx.to(x.dtype), rows[: len(rows) // 16 * 16].sum(0).to(weight.dtype)

    return norm_kernel(gradients=gradients)


@fault(role="rms_norm", caught_by=SHAPES, seen_in="tile-ai/tilelang#2382")
def stores_half_of_the_bits(reference):
    """A float32 sum is put into a 16-bit buffer by its low half instead of by a cast."""

    def gradients(x, weight, eps, dy):
        dx, rows = parts_of(x, weight, eps, dy)
        total = rows.sum(0).float()
        if weight.element_size() == 2:
            return dx.to(x.dtype), total.view(torch.int16)[::2].clone().view(weight.dtype)
        return dx.to(x.dtype), total.to(weight.dtype)

    return norm_kernel(gradients=gradients)


@fault(role="rms_norm", caught_by=SHAPES, seen_in="own")
def adds_up_dweight_in_its_own_dtype(reference):
    """A sum over the rows in 16 bits, rounded at each of them."""

    def gradients(x, weight, eps, dy):
        dx, rows = parts_of(x, weight, eps, dy)
        total = torch.zeros_like(weight)
        for row in rows:
            total = total + row.to(weight.dtype)
        return dx.to(x.dtype), total

    return norm_kernel(gradients=gradients)


@fault(
    role="rms_norm",
    caught_by=[SHAPES, f"{MEMORY}test_layouts[rms_norm]", f"{NORM}test_sizes[rms_norm-300]"],
    seen_in="linkedin/Liger-Kernel#370",
)
def returns_dx_in_the_memory_of_dy(reference):
    """The backward works in place: another consumer of dy reads dx."""

    def gradients(x, weight, eps, dy):
        dx, dweight = right_gradients(x, weight, eps, dy)
        return dy.copy_(dx) if 0 not in dy.stride() else dx, dweight

    return norm_kernel(gradients=gradients)


@fault(
    role="rms_norm",
    caught_by=f"{MEMORY}test_layouts[rms_norm]",
    seen_in="unslothai/unsloth PR#10617",
)
def ignores_the_strides_of_dy(reference):
    """Reads the memory of dy as if it were dense."""
    return norm_kernel(
        gradients=lambda x, weight, eps, dy: right_gradients(x, weight, eps, densely(dy))
    )


@fault(role="rms_norm", caught_by=f"{MEMORY}test_layouts[rms_norm]", seen_in="Dao-AILab/quack#88")
def takes_rows_as_far_apart_as_they_are_long(reference):
    """Reads x with a row stride of its width."""
    return norm_kernel(lambda x, weight, eps: right_values(densely(x), weight, eps))


@fault(
    role="rms_norm",
    caught_by=[SHAPES, f"{MEMORY}test_guards[rms_norm]"],
    seen_in="tile-ai/tilelang#290",
)
def reads_whole_tiles_of_rows(reference):
    """The last tile of 16 rows is read without a bound check and added to dweight."""

    def gradients(x, weight, eps, dy):
        dx, _ = right_gradients(x, weight, eps, dy)
        _, rows = parts_of(padded_tile(x, 16), weight, eps, padded_tile(dy, 16))
        return dx, rows.sum(0).to(weight.dtype)

    return norm_kernel(gradients=gradients)


@fault(
    role="rms_norm",
    caught_by=[SHAPES, f"{MEMORY}test_guards[rms_norm]"],
    seen_in="tile-ai/tilelang#2699",
)
def multiplies_unwritten_scratch_by_zero(reference):
    """Partial sums of workers that had no row are never written, and then weighed with zero."""

    def gradients(x, weight, eps, dy):
        dx, rows = parts_of(x, weight, eps, dy)
        parts = torch.empty(len(rows) + 1, rows.shape[1], dtype=rows.dtype, device=x.device)
        parts[:-1] = rows
        used = torch.ones(len(parts), 1, device=x.device)
        used[-1] = 0
        return dx.to(x.dtype), (parts * used).sum(0).to(weight.dtype)

    return norm_kernel(gradients=gradients)


@fault(role="rms_norm", caught_by=f"{MEMORY}test_layouts[rms_norm]", seen_in="Dao-AILab/quack#88")
def writes_dx_beyond_its_end_where_dy_is_strided(reference):
    """dx is right; rows further apart in dy than in dx take the last write behind its end."""

    def gradients(x, weight, eps, dy):
        dx, dweight = right_gradients(x, weight, eps, dy)
        return dx if dy.is_contiguous() else writes_beyond(dx), dweight

    return norm_kernel(gradients=gradients)


@fault(role="rms_norm", caught_by=f"{MEMORY}test_guards[rms_norm]", seen_in="Dao-AILab/quack#88")
def writes_one_element_too_many(reference):
    """The output is right, and the element behind it is written too."""
    return norm_kernel(lambda x, weight, eps: writes_beyond(right_values(x, weight, eps)))
