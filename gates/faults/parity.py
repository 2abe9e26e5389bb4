"""Models that are nearly the one of transformers: what the parity gates of M4 must reject.

Most are faults of one operator that other gates reject too, under a name of their own: here the
whole model, its loss and its training must show them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gates.faults import (
    accumulation,
    attention,
    clip,
    documents,
    loss,
    operators,
    optimizer,
    positions,
    tied,
)
from harness import fault

FORWARD, TRAINING = "m4_parity_forward::", "m4_parity_training::"
PRETRAINED, WHOLE = "m4_pretrained::", "m4_end_to_end::test_model"
SHAPES = ("llama-1", "llama-3", "qwen2-7", "qwen2-8")
LAYOUTS = ("rows", "padded", "packed")
GROUPED, BIASED = SHAPES[1:], SHAPES[2:]
TIED, OTHER_THETA = ("llama-1", "qwen2-7"), SHAPES[1:]


def random(test, shapes=SHAPES, layouts=LAYOUTS):
    """The cases of a gate over random weights."""
    return [f"{FORWARD}{test}[{shape}-{layout}]" for shape in shapes for layout in layouts]


def both(shapes=SHAPES, layouts=LAYOUTS):
    """The cases in float32, and in bfloat16 the packed ones of two shapes."""
    in_bfloat16 = [shape for shape in ("llama-3", "qwen2-8") if shape in shapes]
    packed = [layout for layout in layouts if layout == "packed"]
    return random("test_float32", shapes, layouts) + random("test_bfloat16", in_bfloat16, packed)


def with_operator(reference, role, wrong):
    """A build_model whose models use another operator than the stack's."""

    def build_model(config, stack):
        return reference.build_model(config, stack.replace({role: wrong}))

    return build_model


# --- rotary embeddings -----------------------------------------------------------------------


@fault(
    role="rope",
    caught_by=[*both(), f"{PRETRAINED}test_values[packed]", WHOLE],
    seen_in="own",
)
def pairs_neighbours_in_every_layer(reference):
    """Interleaved pairing, as in the original Llama code, over weights for half-split pairs."""
    return positions.rotates_neighbours.build(reference)


@fault(
    role="build_model",
    caught_by=[*both(OTHER_THETA), f"{PRETRAINED}test_values[row-of-512]"],
    seen_in="lyogavin/airllm PR#369",
)
def leaves_theta_at_its_default(reference):
    """theta is 1e4 whatever config.json says."""
    return positions.loses_theta_from_the_configuration.build(reference)


@fault(
    role="rope",
    caught_by=[*random("test_float32"), f"{FORWARD}test_far_apart", f"{WHOLE}[float32-rows]"],
    seen_in="EleutherAI/gpt-neox#1003",
)
def rounds_frequencies_with_the_model(reference):
    """model.to(bfloat16) took the rotary frequencies with it."""
    return positions.keeps_frequencies_in_bfloat16.build(reference)


@fault(
    role="rope",
    caught_by=[*random("test_bfloat16", ["llama-1", "qwen2-7"], ["rows"]),
               f"{FORWARD}test_far_apart", f"{WHOLE}[bfloat16-rows]"],
    seen_in="huggingface/candle PR#3520",
)  # fmt: skip
def rounds_positions_with_the_model(reference):
    """Positions are cast to bfloat16: from 256 on neighbours share one."""
    return positions.casts_positions_to_the_model_s_dtype.build(reference)


# --- attention -------------------------------------------------------------------------------


@fault(
    role="attention",
    caught_by=[*both(GROUPED), f"{PRETRAINED}test_values[packed]"],
    seen_in="apple/axlearn PR#842",
)
def tiles_kv_heads_over_the_queries(reference):
    """Query heads read kv heads 0 1 0 1 ... instead of 0 0 ... 1 1."""
    return attention.tiles_the_kv_heads.build(reference)


@fault(role="attention", caught_by=[*both(), WHOLE], seen_in="huggingface/transformers#48745")
def drops_the_causal_mask(reference):
    """Every token of a document sees all of it."""
    return attention.has_no_causal_mask.build(reference)


@fault(role="attention", caught_by=[*both(), WHOLE], seen_in="own")
def scales_by_the_head_width(reference):
    """Divides scores by H instead of sqrt(H)."""
    return attention.divides_scores_by_the_head_width.build(reference)


@fault(role="build_model", caught_by=both(("llama-1", "qwen2-7", "qwen2-8")), seen_in="own")
def takes_the_head_width_for_d_over_n(reference):
    """The scale is that of heads of width D / N, although the configuration has another."""

    def build_model(config, stack):
        factor = (config.head_width * config.num_query_heads / config.model_width) ** 0.5

        def attention(q, k, v, documents):
            return stack.attention(q * factor, k, v, documents)

        return with_operator(reference, "attention", attention)(config, stack)

    return build_model


@fault(
    role="attention",
    caught_by=[*both(layouts=["padded", "packed"]), f"{PRETRAINED}test_values[packed]",
               f"{WHOLE}[float32-packed]", f"{WHOLE}[bfloat16-packed]"],
    seen_in="huggingface/transformers PR#46634",
)  # fmt: skip
def attends_to_padding_and_other_documents(reference):
    """The plain causal mask, whatever the documents: padding on the left is attended."""
    return documents.believes_that_restarted_positions_separate.build(reference)


# --- norms, projections, head ----------------------------------------------------------------


@fault(
    role="rms_norm",
    caught_by=[f"{FORWARD}test_norms", f"{PRETRAINED}test_norms"],
    seen_in="vllm-project/vllm PR#3653",
)
def casts_before_the_gain(reference):
    """Rounds the normalised values, then multiplies by the gain and rounds again."""
    return operators.rounds_before_the_gain.build(reference)


@fault(
    role="add_rms_norm",
    caught_by=[f"{FORWARD}test_norms", f"{PRETRAINED}test_norms"],
    seen_in="vllm-project/vllm PR#3653",
)
def casts_the_fused_norm_before_the_gain(reference):
    """The same in a norm that adds the residual."""
    rms_norm = operators.rounds_before_the_gain.build(reference)

    def add_rms_norm(x, residual, weight, eps):
        total = x + residual
        return rms_norm(total, weight, eps), total

    return add_rms_norm


@fault(
    role="build_model",
    caught_by=random("test_float32", ("llama-1", "llama-3", "qwen2-8")),
    seen_in="own",
)
def leaves_epsilon_at_its_default(reference):
    """Norms add 1e-6 whatever config.json says."""

    def build_model(config, stack):
        model = reference.build_model(replace(config, norm_epsilon=1e-6), stack)
        model.config = config
        return model

    return build_model


@fault(role="build_model", caught_by=both(BIASED), seen_in="own")
def forgets_the_biases_of_qwen2(reference):
    """The loader knows Llama, which has no biases; those of q, k and v stay out."""

    def build_model(config, stack):
        def linear(x, weight, bias):
            return stack.linear(x, weight, None)

        return with_operator(reference, "linear", linear)(config, stack)

    return build_model


@fault(
    role="build_model",
    caught_by=[*both(TIED), f"{FORWARD}test_bfloat16[qwen2-7-padded]",
               f"{TRAINING}test_float32[llama-1-rows]",
               f"{TRAINING}test_bfloat16[qwen2-7-padded]", f"{PRETRAINED}test_gradients"],
    seen_in="NVIDIA-NeMo/Automodel PR#2511",
)  # fmt: skip
def trains_a_copy_of_the_embedding(reference):
    """The head of a tied model is a copy: right until the first update."""
    return tied.ties_by_copying.build(reference)


@fault(
    role="swiglu",
    caught_by=[*random("test_float32"), f"{WHOLE}[float32-rows]", f"{WHOLE}[float32-packed]"],
    seen_in="unslothai/unsloth#3314",
)
def has_half_a_derivative(reference):
    """The forward is right; the backward lacks gate * sigmoid * (1 - sigmoid)."""
    return operators.drops_a_term_of_the_derivative.build(reference)


@fault(
    role="token_nll",
    caught_by=[
        *random("test_bfloat16", layouts=["packed"]),
        f"{WHOLE}[bfloat16-rows]",
        f"{WHOLE}[bfloat16-packed]",
    ],
    seen_in="Modalities/modalities PR#464",
)
def takes_the_loss_of_rounded_logits(reference):
    """Logits and log-softmax in bfloat16: the loss of a token has steps of 1/32."""
    return loss.takes_the_softmax_of_16_bit_logits.build(reference)


@fault(
    role="build_model",
    caught_by=[*random("test_bfloat16", layouts=["packed"]), f"{PRETRAINED}test_bfloat16",
               f"{WHOLE}[bfloat16-rows]", f"{WHOLE}[bfloat16-packed]"],
    seen_in="own",
)  # fmt: skip
def multiplies_with_6_bit_mantissas(reference):
    """A fast path of the matrix product that keeps 6 of the 8 bits of bfloat16."""

    def build_model(config, stack):
        def linear(x, weight, bias):
            return stack.linear(shortened(x), shortened(weight), bias)

        return with_operator(reference, "linear", linear)(config, stack)

    return build_model


def shortened(x):
    """x with two bits less, in the forward; its gradient is handed on."""
    if x.dtype != torch.bfloat16:
        return x
    step = x.detach() * 3  # 4 x - 3 x is x rounded to a spacing 4 times as wide
    return x + ((x.detach() * 4 - step) - x.detach())


# --- updates ---------------------------------------------------------------------------------


@fault(
    role="accumulate",
    caught_by=[f"{TRAINING}test_float32", f"{TRAINING}test_bfloat16"],
    seen_in="meta-pytorch/torchtune PR#1875",
)
def takes_the_mean_of_microbatch_means(reference):
    """Each microbatch is divided by its own targets, and by the number of microbatches."""
    return accumulation.mean_of_microbatch_means.build(reference)


@fault(
    role="clip_grad_norm",
    caught_by=f"{TRAINING}test_float32",
    seen_in="own",
)
def reports_the_norm_of_matrices(reference):
    """Biases and gains are left out of the norm; Adam hides what that does to the step."""
    return clip.leaves_vectors_out.build(reference)


@fault(
    role="param_groups",
    caught_by=[f"{TRAINING}test_float32", f"{PRETRAINED}test_updates"],
    seen_in="ServiceNow/Fast-LLM PR#545",
)
def decays_gains_like_matrices(reference):
    """Gains and biases are pulled towards zero."""
    return optimizer.decays_everything.build(reference)


@fault(role="optimizer_step", caught_by=f"{TRAINING}test_float32", seen_in="own")
def lets_the_moments_start_uncorrected(reference):
    """No bias correction: the first steps are of another size than torch's."""
    return optimizer.no_bias_correction.build(reference)


@fault(role="optimizer_step", caught_by=f"{TRAINING}test_float32", seen_in="own")
def steps_in_the_exchanged_betas(reference):
    """beta1 and beta2 change places."""
    return optimizer.swaps_the_betas.build(reference)
