"""Wrong models: how they start, and what they leave out."""

from __future__ import annotations

import torch
from torch import nn

from harness import fault
from reference.config import DecoderConfig

INITIALIZATION, MODEL = "m1_initialization::", "m1_model::"
HAS_GRADIENT = f"{INITIALIZATION}test_every_parameter_has_a_gradient"
VALUES = f"{MODEL}test_values_and_gradients"


def changed_by(reference, change):
    """A build_model that applies change(model) to what the reference builds."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        with torch.no_grad():
            change(model)
        return model

    return build_model


def decoder_changed_by(reference, change):
    """The same, for decoders only."""
    return changed_by(
        reference, lambda model: change(model) if isinstance(model.config, DecoderConfig) else None
    )


# --- how a model starts ----------------------------------------------------------------------


@fault(
    role="build_model",
    caught_by=[f"{INITIALIZATION}test_first_loss", f"{INITIALIZATION}test_draws"],
    seen_in="PiotrNawrot/nanoT5#25",
)
def draws_the_head_with_deviation_1(reference):
    """The head, tied or not, starts 50 times too large."""
    return changed_by(reference, lambda model: model.lm_head.weight.normal_(std=1.0))


@fault(
    role="build_model",
    caught_by=[f"{INITIALIZATION}test_draws[rung]", f"{INITIALIZATION}test_draws[rung-untied]"],
    seen_in="tinygrad/tinygrad PR#16623",
)
def starts_gate_and_up_equal(reference):
    """gate_proj and up_proj hold the same draw."""

    def change(model):
        for layer in model.layers:
            layer.mlp.up_proj.weight.copy_(layer.mlp.gate_proj.weight)

    return decoder_changed_by(reference, change)


@fault(role="build_model", caught_by=f"{INITIALIZATION}test_draws", seen_in="own")
def starts_every_layer_equal(reference):
    """All layers are copies of the first."""

    def change(model):
        for layer in model.layers[1:]:
            layer.load_state_dict(model.layers[0].state_dict())

    return changed_by(reference, change)


@fault(role="build_model", caught_by=f"{INITIALIZATION}test_draws", seen_in="own")
def leaves_the_default_initialization(reference):
    """Layers keep the uniform draw of torch.nn.Linear instead of the configured deviation."""

    def change(model):
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".layers." in f".{name}":
                nn.init.kaiming_uniform_(parameter, a=5**0.5)

    return changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=[f"{INITIALIZATION}test_draws", HAS_GRADIENT],
    seen_in="own",
)
def starts_outputs_at_zero(reference):
    """o_proj starts at zero, so that nothing before it has a gradient in the first step."""

    def change(model):
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()

    return changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=[
        HAS_GRADIENT,
        f"{INITIALIZATION}test_every_parameter_moves",
        "m1_one_step::test_one_update",
    ],
    seen_in="huggingface/candle PR#3526",
)
def cuts_off_the_first_layer(reference):
    """A layer's output is detached: everything before it stands still."""

    def change(model):
        model.layers[0].register_forward_hook(lambda layer, inputs, output: output.detach())

    return changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=[HAS_GRADIENT, f"{INITIALIZATION}test_every_parameter_moves"],
    seen_in="own",
)
def freezes_the_gains(reference):
    """Vectors were left out of training with requires_grad_(False)."""

    def change(model):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() > 1)

    return changed_by(reference, change)


# --- what is left out ------------------------------------------------------------------------


@fault(
    role="build_model",
    caught_by=[f"{VALUES}[decoder-untied]", f"{VALUES}[chargpt]"],
    seen_in="own",
)
def loses_the_epsilon_of_the_norms(reference):
    """Norms use 1e-6 whatever the configuration says."""

    def change(model):
        for module in model.modules():
            if hasattr(module, "epsilon"):
                module.epsilon = 1e-6

    return changed_by(reference, change)


@fault(role="build_model", caught_by=VALUES, seen_in="own")
def leaves_out_the_last_norm(reference):
    """Returns the hidden states before the final norm."""

    def change(model):
        model.norm.forward = lambda x: x * model.norm.weight

    return changed_by(reference, change)


@fault(role="build_model", caught_by=VALUES, seen_in="own")
def norms_the_feed_forward_with_the_other_gain(reference):
    """input_layernorm is used in both places."""

    def with_gain_of(norm):
        def forward(x, *residual):  # the decoder's norm adds the residual, CharGPT's has none
            total = sum(residual, x)
            return (norm(total), total) if residual else norm(total)

        return forward

    def change(model):
        for layer in model.layers:
            layer.post_attention_layernorm.forward = with_gain_of(layer.input_layernorm)

    return changed_by(reference, change)


@fault(role="build_model", caught_by=f"{MODEL}test_bfloat16", seen_in="own")
def computes_in_8_bits(reference):
    """Where bfloat16 was asked for, weights pass through float8."""

    def build_model(config, stack):
        def linear(x, weight, bias):
            if weight.dtype == torch.bfloat16:
                # Shift by the scale of the initialization, as a scaled cast would.
                weight = (weight * 64).to(torch.float8_e4m3fn).to(weight.dtype) / 64
            return stack.linear(x, weight, bias)

        return reference.build_model(config, stack.replace({"linear": linear}))

    return build_model


@fault(role="build_model", caught_by=f"{VALUES}[decoder]", seen_in="own")
def leaves_out_the_biases(reference):
    """q, k and v are projected without their biases."""

    def build_model(config, stack):
        def linear(x, weight, bias):
            return stack.linear(x, weight, None)

        return reference.build_model(config, stack.replace({"linear": linear}))

    return build_model
