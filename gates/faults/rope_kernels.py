"""Kernels of the rotation that are wrong at a tile's edge, far out, or backward; and right ones."""

from __future__ import annotations

import torch

from gates.faults.kernels import densely, wide
from harness import benign, fault

ROPE = "m4_rope::"
SHAPES, FAR = f"{ROPE}test_shapes", f"{ROPE}test_far_positions"


def tables(positions, head_width, theta, dtype):
    """cos and sin [B, T, 1, H / 2]."""
    exponent = torch.arange(0, head_width, 2, device=positions.device, dtype=dtype) / head_width
    angles = positions[..., None].to(dtype) * theta**-exponent
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def turned(x, cos, sin):
    first, second = wide(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_kernel(forward=turned, backward=lambda dy, cos, sin: turned(dy, cos, -sin), table=tables):
    """The rotation with its backward by hand."""

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.save_for_backward(cos, sin)
            return forward(x, cos, sin)

        @staticmethod
        def backward(ctx, dy):
            return backward(dy, *ctx.saved_tensors), None, None

    def rope(q, k, positions, theta):
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (t.to(dtype) for t in table(positions, q.shape[-1], theta, dtype))
        return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)

    return rope


@fault(role="rope", caught_by=[SHAPES, FAR, f"{ROPE}test_models[rung]"], seen_in="own")
def turns_gradients_forward(reference):
    """The backward turns by the same angle again instead of turning back."""
    return rope_kernel(backward=turned)


@fault(role="rope", caught_by=FAR, seen_in="EleutherAI/gpt-neox#1003")
def keeps_frequencies_in_16_bits(reference):
    """Frequencies pass through bfloat16: 2 off at position 4096."""

    def table(positions, head_width, theta, dtype):
        exponent = torch.arange(0, head_width, 2, device=positions.device) / head_width
        frequency = (theta**-exponent).bfloat16().to(dtype)
        angles = positions[..., None].to(dtype) * frequency
        return angles.cos()[:, :, None], angles.sin()[:, :, None]

    return rope_kernel(table=table)


@fault(role="rope", caught_by=FAR, seen_in="huggingface/candle PR#3520")
def keeps_positions_in_16_bits(reference):
    """Position 15962 becomes 15936 or 15968."""

    def table(positions, head_width, theta, dtype):
        return tables(positions.bfloat16().to(dtype), head_width, theta, dtype)

    return rope_kernel(table=table)


@fault(role="rope", caught_by=FAR, seen_in="own")
def recomputes_angles_in_16_bits_backward(reference):
    """The forward is right; the backward makes its tables anew, in bfloat16."""

    def backward(dy, cos, sin):
        angle = torch.atan2(sin, cos).bfloat16().to(cos.dtype)
        return turned(dy, angle.cos(), -angle.sin())

    return rope_kernel(backward=backward)


@fault(role="rope", caught_by=SHAPES, seen_in="tile-ai/tilelang-ascend#1654")
def leaves_the_last_tokens_unturned(reference):
    """Tokens after the last whole tile of 16 are copied."""

    def forward(x, cos, sin):
        end = x.shape[1] // 16 * 16
        return torch.cat((turned(x[:, :end], cos[:, :end], sin[:, :end]), x[:, end:]), dim=1)

    return rope_kernel(forward)


@fault(role="rope", caught_by=[SHAPES, FAR], seen_in="own")
def reads_the_first_row_s_positions(reference):
    """Every row is turned by the positions of row 0."""
    return rope_kernel(table=lambda positions, *rest: tables(positions[:1], *rest))


@fault(role="rope", caught_by=SHAPES, seen_in="own")
def takes_the_index_for_the_position(reference):
    """Tokens are turned by their place in the row."""

    def table(positions, *rest):
        places = torch.arange(positions.shape[1], device=positions.device)
        return tables(places.expand_as(positions), *rest)

    return rope_kernel(table=table)


@fault(role="rope", caught_by=f"{SHAPES}[7/1]", seen_in="own")
def turns_four_heads_at_most(reference):
    """A tile of four heads, and no loop over tiles."""

    def forward(x, cos, sin):
        return torch.cat((turned(x[:, :, :4], cos, sin), x[:, :, 4:]), dim=2)

    return rope_kernel(forward)


@fault(role="rope", caught_by="m4_memory::test_layouts[rope]", seen_in="unslothai/unsloth PR#10617")
def ignores_the_strides_of_heads(reference):
    """Reads queries and keys as if they were dense; views of a fused projection are not."""
    return rope_kernel(lambda x, cos, sin: turned(densely(x), cos, sin))


EVERY_ROPE_GATE = [SHAPES, FAR, f"{ROPE}test_models[rung]", "m4_memory::test_layouts[rope]"]


@benign(
    role="rope",
    accepted_by=EVERY_ROPE_GATE,
    because="tables rounded once, after the angle: 2e-3 off (KellerJordan/modded-nanogpt#39)",
)
def rounds_finished_tables_to_the_input_s_dtype(reference):
    """cos and sin are kept in the dtype of the queries; angles were float32."""

    def rope(q, k, positions, theta):
        def table(*arguments):
            return tuple(t.to(q.dtype) for t in tables(*arguments))

        return rope_kernel(table=table)(q, k, positions, theta)

    return rope


@benign(
    role="rope",
    accepted_by=EVERY_ROPE_GATE,
    because="half-split pairing with a table of its own (karpathy/nanochat#264: a false alarm)",
)
def multiplies_complex_numbers(reference):
    """Pairs (i, i + H/2) as complex numbers times exp(i angle)."""

    def rope(q, k, positions, theta):
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = tables(positions, q.shape[-1], theta, dtype)
        unit = torch.complex(cos, sin)

        def turn(x):
            z = torch.complex(*wide(x).chunk(2, dim=-1)) * unit
            return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)

        return turn(q), turn(k)

    return rope
