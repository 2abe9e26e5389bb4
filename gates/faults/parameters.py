"""Wrong and right ways to count parameters."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch

from harness import benign, fault
from reference.config import DecoderConfig
from reference.ledger.parameters import ParameterCount

ANY_DECODER = "m0_parameters::test_any_decoder"
ANY_CHARGPT = "m0_parameters::test_any_chargpt"
PARTS = "m0_parameters::test_parts"
BUILT = "m0_parameters::test_built_presets[qwen2.5-0.5b]"


def published(*names):
    return [f"m0_parameters::test_published[{name}]" for name in names]


def counted_with(change, family=DecoderConfig):
    """A parameter_count in which `change(config, count)` replaces parts for one model family."""

    def build(reference):
        def parameter_count(config):
            count = reference.parameter_count(config)
            return replace(count, **change(config, count)) if isinstance(config, family) else count

        return parameter_count

    return build


@fault(role="parameter_count", caught_by=ANY_DECODER, seen_in="allenai/OLMo-core PR#478")
def head_width_from_model_width(reference):
    """Takes D // N for the head width, though it is configured."""
    return counted_with(
        lambda c, n: {
            "attention": n.attention // c.head_width * (c.model_width // c.num_query_heads)
        }
    )(reference)


@fault(role="parameter_count", caught_by=[ANY_DECODER, PARTS], seen_in="allenai/OLMo-core PR#478")
def one_up_projection(reference):
    """Counts two matrices in SwiGLU: the gate is forgotten."""
    return counted_with(lambda c, n: {"feed_forward": n.feed_forward * 2 // 3})(reference)


@fault(role="parameter_count", caught_by=[ANY_DECODER, PARTS], seen_in="allenai/OLMo-core PR#478")
def ungrouped_keys_and_values(reference):
    """Gives keys and values the width D."""
    return counted_with(
        lambda c, n: {
            "attention": c.num_layers * c.model_width
            * (2 * c.num_query_heads * c.head_width + 2 * c.model_width)
        }
    )(reference)  # fmt: skip


@fault(
    role="parameter_count",
    caught_by=[ANY_DECODER, PARTS, *published("qwen2.5-0.5b", "plan-1.15b"), BUILT],
    seen_in="own",
)
def tied_table_counted_twice(reference):
    """Counts the head beside the embedding although they are one table."""
    return counted_with(lambda c, n: {"head": n.embedding})(reference)


@fault(
    role="parameter_count",
    caught_by=[ANY_DECODER, *published("qwen2.5-0.5b", "qwen2.5-7b")],
    seen_in="own",
)
def qkv_bias_forgotten(reference):
    """Counts no bias although q, k and v have one."""
    return counted_with(lambda c, n: {"biases": 0})(reference)


@fault(role="parameter_count", caught_by=[ANY_DECODER, *published("qwen2.5-7b")], seen_in="own")
def bias_on_the_output_too(reference):
    """Counts a bias on the output projection, which has none in Qwen2."""
    return counted_with(
        lambda c, n: {"biases": n.biases + c.qkv_bias * c.num_layers * c.model_width}
    )(reference)


@fault(role="parameter_count", caught_by=[ANY_DECODER, PARTS, ANY_CHARGPT], seen_in="own")
def final_norm_forgotten(reference):
    """Counts the norms of the layers only."""
    return counted_with(
        lambda c, n: {"norms": n.norms // (2 * c.num_layers + 1) * 2 * c.num_layers}, object
    )(reference)


@fault(
    role="parameter_count",
    caught_by=[ANY_CHARGPT, *published("chargpt-smoke", "chargpt-default")],
    seen_in="own",
)
def learned_positions_forgotten(reference):
    """Counts the character GPT as if its positions were rotary."""
    return counted_with(lambda c, n: {"positions": 0}, object)(reference)


@fault(
    role="param_groups",
    caught_by="m0_parameters::test_decay_groups",
    seen_in="ServiceNow/Fast-LLM#542",
)
def gains_decay_too(reference):
    """Puts every parameter into the group that decays."""

    def param_groups(model, weight_decay):
        decays, stays = reference.param_groups(model, weight_decay)
        return [{**decays, "params": decays["params"] + stays["params"]}, {**stays, "params": []}]

    return param_groups


THETA_OTHER_THAN_DEFAULT = [f"m0_parameters::test_rope_theta[{x}]" for x in (500000.0, 1000000.0)]


@fault(role="build_model", caught_by=THETA_OTHER_THAN_DEFAULT, seen_in="lyogavin/airllm PR#369")
def theta_of_the_configuration_lost(reference):
    """Builds the model with theta 1e4 whatever the configuration says."""

    def build_model(config, stack):
        return reference.build_model(replace(config, rope_theta=1e4), stack)

    return build_model


@fault(role="rotary_frequencies", caught_by="m0_parameters::test_rope_theta", seen_in="own")
def frequencies_of_half_the_exponent(reference):
    """Records theta^(-i/H), the exponent of a head twice as wide."""

    def rotary_frequencies(config):
        return tuple(math.sqrt(x) for x in reference.rotary_frequencies(config))

    return rotary_frequencies


@benign(
    role="parameter_count",
    accepted_by=["m0_parameters::test_published", ANY_DECODER, ANY_CHARGPT, PARTS],
    because="the sum over the built model's own parameters needs no formula",
)
def counted_on_the_meta_model(reference):
    """Builds the model without memory and adds its parameters up, a shared one once."""

    def parameter_count(config):
        with torch.device("meta"):
            model = reference.build_model(config, reference)
        parts = dict.fromkeys((field.name for field in fields(ParameterCount)), 0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                part = "norms"
            elif parameter.ndim == 1:
                part = "biases"
            elif name.startswith(("embed", "lm_head")):
                part = {"embed_tokens": "embedding", "embed_positions": "positions"}.get(
                    name.partition(".")[0], "head"
                )
            else:
                part = "attention" if "attn" in name else "feed_forward"
            parts[part] += parameter.numel()
        return ParameterCount(**parts)

    return parameter_count
