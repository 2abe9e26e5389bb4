"""Other right models: what the parity gates of M4 must accept."""

from __future__ import annotations

import torch

from gates.faults import model_benign, positions
from harness import benign

FLOAT32 = ["m4_parity_forward::test_float32", "m4_parity_training::test_float32"]
BFLOAT16 = [
    "m4_parity_forward::test_bfloat16[llama-1-padded]",
    "m4_parity_forward::test_bfloat16[qwen2-7-rows]",
    "m4_parity_forward::test_bfloat16[qwen2-8-packed]",
    "m4_parity_training::test_bfloat16[llama-1-rows]",
    "m4_parity_training::test_bfloat16[qwen2-8-packed]",
]
WHOLE = "m4_end_to_end::test_model"
EVERYWHERE = [*FLOAT32, *BFLOAT16, WHOLE]
IN_16_BITS = [
    *BFLOAT16,
    "m4_parity_forward::test_far_apart",
    f"{WHOLE}[bfloat16-rows]",
    f"{WHOLE}[bfloat16-packed]",
]


@benign(
    role="attention",
    accepted_by=[*EVERYWHERE, "m4_pretrained::test_values[packed]", "m4_pretrained::test_bfloat16"],
    because="the formula, step by step, in the dtype of the heads",
)
def attends_by_an_explicit_softmax(reference):
    """Scores, -inf, softmax and product one after the other."""
    return model_benign.takes_an_explicit_softmax.build(reference)


@benign(role="attention", accepted_by=EVERYWHERE, because="a softmax may be taken in blocks")
def attends_block_by_block(reference):
    """An online softmax over blocks of 5 keys: another order of the same sums."""
    return model_benign.meets_keys_block_by_block.build(reference)


@benign(role="linear", accepted_by=EVERYWHERE, because="sums over two halves are the sum")
def projects_in_two_halves(reference):
    """A product split along the summed dimension."""
    return model_benign.sums_two_halves_of_the_input.build(reference)


@benign(
    role="rope",
    accepted_by=IN_16_BITS,
    because="exact angles, and tables as exact as the heads (KellerJordan/modded-nanogpt#39)",
)
def casts_finished_tables(reference):
    """Cosines and sines from float32 angles, cast to bfloat16 where the heads are bfloat16."""
    return positions.rounds_tables_to_the_heads_dtype.build(reference)


@benign(
    role="rms_norm",
    accepted_by=IN_16_BITS,
    because="the order of Llama: transformers has it, and errors within the bound (the contract of "
    "the operator is another, which test_norms holds)",
)
def casts_before_the_gain_as_transformers(reference):
    """Rounds the normalised values, then multiplies by the gain."""

    def rms_norm(x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * inverse_rms).to(x.dtype) * weight.to(x.dtype)

    return rms_norm


@benign(
    role="add_rms_norm",
    accepted_by=["m4_parity_forward::test_norms", "m4_pretrained::test_norms"],
    because="the sum, and the norm of it",
)
def adds_the_residual_in_the_norm(reference):
    """One operator for both, as a fused kernel is."""

    def add_rms_norm(x, residual, weight, eps):
        total = x + residual
        return reference.rms_norm(total, weight, eps), total

    return add_rms_norm


@benign(role="build_model", accepted_by=EVERYWHERE, because="three products stacked are the three")
def fuses_the_projections(reference):
    """q, k and v come from one product with the stacked weights."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        for layer in model.layers:
            fuse(layer.self_attn, stack)
        return model

    return build_model


def fuse(attention, stack):
    """The three projections of a layer as one product, made when the first of them is asked."""
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    made = {}

    def all_three(x):
        weight = torch.cat([part.weight for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        cast = [t if t is None or parts[0].compute_dtype is None else t.to(x.dtype)
                for t in (weight, bias)]  # fmt: skip
        return stack.linear(x, *cast).split([len(part.weight) for part in parts], dim=-1)

    def first(x):
        made["q"], made["k"], made["v"] = all_three(x)
        return made.pop("q")

    attention.q_proj.forward = first
    attention.k_proj.forward = lambda x: made.pop("k")
    attention.v_proj.forward = lambda x: made.pop("v")


@benign(
    role="token_nll",
    accepted_by=EVERYWHERE,
    because="the loss of chunks adds up; only their logits are in memory",
)
def takes_the_loss_in_chunks(reference):
    """Sums over chunks of 7 rows."""

    def token_nll(hidden, weight, labels):
        parts = [
            reference.token_nll(part, weight, of_part)
            for part, of_part in zip(hidden.split(7), labels.split(7), strict=True)
        ]
        return sum(nll for nll, _ in parts), sum(count for _, count in parts)

    return token_nll


@benign(role="swiglu", accepted_by=EVERYWHERE, because="silu(z) is z sigmoid(z)")
def activates_by_a_sigmoid(reference):
    """gate * sigmoid(gate) in float32 or better, then times up, rounded once."""

    def swiglu(gate, up):
        wide = torch.promote_types(gate.dtype, torch.float32)
        return (gate.to(wide) * torch.sigmoid(gate.to(wide)) * up.to(wide)).to(gate.dtype)

    return swiglu
