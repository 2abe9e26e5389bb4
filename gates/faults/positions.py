"""Wrong rotary embeddings, and other right ones."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from harness import benign, fault

POSITIONS = "m1_positions::"
RELATIVE, VALUES = f"{POSITIONS}test_relative", f"{POSITIONS}test_values"
GRADIENT, MODEL = f"{POSITIONS}test_gradient", f"{POSITIONS}test_model[decoder]"
EVERYWHERE = [RELATIVE, VALUES, GRADIENT, f"{POSITIONS}test_model"]


def frequencies(x, theta, dtype):
    """theta^(-2i/H) for i in 0 ... H/2 - 1."""
    width = x.shape[-1]
    exponent = torch.arange(0, width, 2, device=x.device, dtype=dtype) / width
    return theta**-exponent


def turned(x, angles_BTh):
    """x rotated in pairs (i, i + H/2), in the dtype of the angles."""
    cos, sin = angles_BTh.cos()[:, :, None], angles_BTh.sin()[:, :, None]
    first, second = x.to(angles_BTh.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def wide(x):
    return torch.promote_types(x.dtype, torch.float32)


@fault(
    role="rope",
    caught_by=[f"{VALUES}[torch.bfloat16-theta-1e4]", f"{VALUES}[torch.bfloat16-theta-1e6]"],
    seen_in="huggingface/candle PR#3520",
)
def casts_positions_to_the_model_s_dtype(reference):
    """In bfloat16 position 15962 becomes 15936 and 257 becomes 256."""

    def rope(q, k, positions, theta):
        rounded = positions.to(q.dtype).to(wide(q))
        angles = rounded[..., None] * frequencies(q, theta, wide(q))
        return turned(q, angles), turned(k, angles)

    return rope


@fault(role="rope", caught_by=[VALUES, GRADIENT], seen_in="huggingface/transformers PR#29285")
def keeps_frequencies_in_bfloat16(reference):
    """A cast of the whole model took the table of frequencies with it."""

    def rope(q, k, positions, theta):
        table = frequencies(q, theta, torch.float32).bfloat16().to(wide(q))
        angles = positions[..., None].to(wide(q)) * table
        return turned(q, angles), turned(k, angles)

    return rope


@fault(
    role="rope",
    caught_by=[
        RELATIVE,
        f"{VALUES}[torch.float32-theta-1e4]",
        f"{VALUES}[torch.float32-theta-1e6]",
    ],
    seen_in="EleutherAI/gpt-neox#1003",
)
def rounds_cosines_of_float32_inputs(reference):
    """Casts finished tables to bfloat16 although the heads are float32."""

    def rope(q, k, positions, theta):
        angles = positions[..., None].to(wide(q)) * frequencies(q, theta, wide(q))
        cos, sin = (t.bfloat16().to(wide(q))[:, :, None] for t in (angles.cos(), angles.sin()))

        def rotate(x):
            first, second = x.to(wide(x)).chunk(2, dim=-1)
            y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            return y.to(x.dtype)

        return rotate(q), rotate(k)

    return rope


@fault(
    role="rope",
    caught_by=[RELATIVE, VALUES, GRADIENT, MODEL],
    seen_in="raiyanyahya/how-to-train-your-gpt#6",
)
def lays_frequencies_out_for_other_pairs(reference):
    """Frequencies repeated for neighbours, rotation done on halves."""

    def rope(q, k, positions, theta):
        angles = positions[..., None].to(wide(q)) * frequencies(q, theta, wide(q))
        angles = angles.repeat_interleave(2, dim=-1)[:, :, None]

        def rotate(x):
            first, second = x.to(wide(x)).chunk(2, dim=-1)
            half = torch.cat((-second, first), dim=-1)
            return (x.to(wide(x)) * angles.cos() + half * angles.sin()).to(x.dtype)

        return rotate(q), rotate(k)

    return rope


@fault(role="rope", caught_by=[VALUES, GRADIENT, MODEL], seen_in="own")
def rotates_neighbours(reference):
    """Pairs (2i, 2i + 1): a rotation, but not the one that checkpoints of Qwen2 mean."""

    def rope(q, k, positions, theta):
        def apart(x):
            return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

        def together(x):
            return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)

        return tuple(together(x) for x in reference.rope(apart(q), apart(k), positions, theta))

    return rope


@fault(
    role="rope",
    caught_by=[
        f"{VALUES}[torch.float64-theta-1e6]",
        f"{VALUES}[torch.float32-theta-1e6]",
        f"{VALUES}[torch.bfloat16-theta-1e6]",
        MODEL,
    ],
    seen_in="sgl-project/SpecForge#265",
)
def rotates_with_the_default_theta(reference):
    """Ignores theta and takes 1e4."""
    return lambda q, k, positions, theta: reference.rope(q, k, positions, 1e4)


@fault(role="build_model", caught_by=MODEL, seen_in="lyogavin/airllm PR#369")
def loses_theta_from_the_configuration(reference):
    """The model is built with theta 1e4 whatever the configuration says."""

    def build_model(config, stack):
        if not hasattr(config, "rope_theta"):
            return reference.build_model(config, stack)
        model = reference.build_model(replace(config, rope_theta=1e4), stack)
        model.config = config
        return model

    return build_model


@fault(role="rope", caught_by=[VALUES, GRADIENT, MODEL], seen_in="own")
def rotates_by_the_index(reference):
    """Takes the place in the row for the position."""

    def rope(q, k, positions, theta):
        index = torch.arange(q.shape[1], device=q.device).expand_as(positions)
        return reference.rope(q, k, index, theta)

    return rope


@fault(role="rope", caught_by=[VALUES, MODEL], seen_in="own")
def rotates_all_rows_like_the_first(reference):
    """Positions of row 0 are used for the whole batch."""

    def rope(q, k, positions, theta):
        return reference.rope(q, k, positions[:1].expand_as(positions), theta)

    return rope


@fault(role="rope", caught_by=[RELATIVE, VALUES, GRADIENT, MODEL], seen_in="own")
def leaves_keys_unrotated(reference):
    """Rotates the queries only."""
    return lambda q, k, positions, theta: (reference.rope(q, k, positions, theta)[0], k.clone())


@fault(role="rope", caught_by=[VALUES, GRADIENT], seen_in="own")
def turns_the_other_way(reference):
    """Rotates by the negative angle: relative and length-preserving, and another model."""
    return lambda q, k, positions, theta: reference.rope(q, k, -positions, theta)


@benign(
    role="rope",
    accepted_by=EVERYWHERE,
    because="half-split pairing with its own doubled table (karpathy/nanochat#264, a false alarm)",
)
def rotates_halves_with_a_doubled_table(reference):
    """x * cos + rotate_half(x) * sin with tables of the full head width."""

    def rope(q, k, positions, theta):
        angles = positions[..., None].to(wide(q)) * frequencies(q, theta, wide(q))
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]

        def rotate(x):
            first, second = x.to(wide(x)).chunk(2, dim=-1)
            half = torch.cat((-second, first), dim=-1)
            return (x.to(wide(x)) * angles.cos() + half * angles.sin()).to(x.dtype)

        return rotate(q), rotate(k)

    return rope


@benign(
    role="rope", accepted_by=EVERYWHERE, because="a table row is computed once and then looked up"
)
def looks_angles_up(reference):
    """A cached table of cosines and sines in float32 or better, indexed by position."""
    tables = {}

    def rope(q, k, positions, theta):
        key = (theta, q.shape[-1], wide(q), q.device)
        if key not in tables:
            every = torch.arange(2**15, device=q.device, dtype=wide(q))
            tables[key] = every[:, None] * frequencies(q, theta, wide(q))
        angles = tables[key][positions]
        return turned(q, angles), turned(k, angles)

    return rope


@benign(
    role="rope",
    accepted_by=[f"{VALUES}[torch.bfloat16-theta-1e4]", f"{VALUES}[torch.bfloat16-theta-1e6]"],
    because="exact angles, and tables as exact as the heads (KellerJordan/modded-nanogpt#39)",
)
def rounds_tables_to_the_heads_dtype(reference):
    """Casts finished float32 tables to bfloat16 where the heads are bfloat16."""

    def rope(q, k, positions, theta):
        angles = positions[..., None].to(wide(q)) * frequencies(q, theta, wide(q))
        cos, sin = (t.to(q.dtype)[:, :, None] for t in (angles.cos(), angles.sin()))

        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        return rotate(q), rotate(k)

    return rope


@benign(role="rope", accepted_by=EVERYWHERE, because="exp(-(2i/H) ln theta) is theta^(-2i/H)")
def takes_frequencies_from_a_logarithm(reference):
    """Frequencies as an exponential."""

    def rope(q, k, positions, theta):
        width = q.shape[-1]
        exponent = torch.arange(0, width, 2, device=q.device, dtype=wide(q)) / width
        angles = positions[..., None].to(wide(q)) * torch.exp(-exponent * math.log(theta))
        return turned(q, angles), turned(k, angles)

    return rope
