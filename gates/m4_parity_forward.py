"""M4. The model is the one that transformers means: same weights, same tokens, same numbers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from gates import outcomes, parity, probes, toys, twins
from harness import gate
from reference.config import DecoderConfig

OPERATORS = ["rms_norm", "rope", "attention", "swiglu", "linear", "token_nll"]


def shape(width, heads, head_width, **changes):
    """Three layers; `heads` are (query heads, key/value heads)."""
    return DecoderConfig(
        vocabulary_size=97,
        model_width=width,
        feed_forward_width=2 * width + 8,
        num_layers=3,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_width=head_width,
        max_positions=4096,
        **changes,
    )


# More than one key/value head wherever they are grouped: with one, tiled and repeated are the same.
SHAPES = {
    "llama-1": shape(32, (4, 4), 12, rope_theta=1e4, norm_epsilon=1e-3, tied_head=True),
    "llama-3": shape(72, (9, 3), 8, rope_theta=5e5, norm_epsilon=1e-5, tied_head=False),
    "qwen2-7": shape(56, (14, 2), 8, rope_theta=1e6, qkv_bias=True, tied_head=True),
    "qwen2-8": shape(
        40, (16, 2), 6, rope_theta=1e6, norm_epsilon=1e-4, qkv_bias=True, tied_head=False
    ),
}
LAYOUTS = ("rows", "padded", "packed")
MANY = (4, 160)  # rows and tokens enough that errors of 1 % a token leave the mean 1e-3


def random_batch(rng, config, layout, first_position=0, shape=(2, 96)):
    ids_BT = torch.randint(config.vocabulary_size, shape, generator=rng)
    return twins.batch(ids_BT, layout, first_position)


def built(stack, config, weights, device):
    with torch.device(device):
        model = stack.build_model(config, stack).to(device)
    model.load_state_dict(weights)
    return model


# What does not depend on what is on trial is made once for all variants of a case.


@functools.lru_cache(maxsize=1)
def known_float32(name, layout, seed, device):
    """(weights, batch, outcome of transformers) of a case."""
    rng = torch.Generator().manual_seed(seed)
    weights = twins.random_weights(SHAPES[name], rng)
    batch = random_batch(rng, SHAPES[name], layout).to(device)
    twin = twins.load(twins.build(SHAPES[name], torch.float32, device), weights)
    return weights, batch, outcomes.of_twin(twin, batch, gradients=True)


@functools.lru_cache(maxsize=1)
def known_bfloat16(name, layout, seed, device):
    """(weights, batch, oracle, outcome of transformers in bfloat16) of a case."""
    config, rng = SHAPES[name], torch.Generator().manual_seed(seed)
    weights = twins.random_weights(config, rng, torch.bfloat16)
    batch = random_batch(rng, config, layout, first_position=2000, shape=MANY)
    oracle_model = built(probes.REFERENCE, config, weights, "cpu").double()
    oracle = outcomes.of_stack(probes.REFERENCE, oracle_model, batch, gradients=True)
    batch = batch.to(device)
    twin = twins.load(twins.build(config, torch.bfloat16, device), weights)
    return weights, batch, oracle, outcomes.of_twin(twin, batch, gradients=True)


@gate(
    claim="in float32, hidden states of every layer, logits, loss and the gradient of every "
    "parameter are those of transformers, to 1e-5",
    roles=["build_model", *OPERATORS],
    not_claimed="that both are not wrong in the same way: M1 compares operators with formulas",
    source="transformers' Qwen2ForCausalLM and LlamaForCausalLM, eager attention",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_float32(stack, name, layout, rng, device, check):
    weights, batch, want = known_float32(name, layout, rng.initial_seed(), device)
    model = built(stack, SHAPES[name], weights, device)
    got = outcomes.of_stack(stack, model, batch, gradients=True)
    parity.check_close(check, got, want, at_most=1e-5, because="float32 on both sides")


@gate(
    claim="in bfloat16 the errors are at most 1.5 times those of transformers in bfloat16",
    roles=["build_model", *OPERATORS],
    not_claimed="that bfloat16 is precise enough to train with",
    source="the oracle in float64 on the CPU; transformers with bfloat16 weights",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16(stack, name, layout, rng, device, check):
    narrow = replace(SHAPES[name], compute_dtype=toys.require_bfloat16(stack))
    weights, batch, oracle, plain = known_bfloat16(name, layout, rng.initial_seed(), device)
    model = built(stack, narrow, weights, device)
    got = outcomes.of_stack(stack, model, batch, gradients=True)
    parity.check_ratios(check, got, plain, oracle, k=1.5, whose="transformers")


@gate(
    claim="in bfloat16 each norm of the model multiplies by the gain before its one rounding",
    roles=["build_model", "rms_norm", "add_rms_norm"],
    not_claimed="that transformers does so: its Llama and Qwen2 round before the gain as well",
    source="google/gemma_pytorch PR#67, vllm-project/vllm PR#3653: the order of cast and gain",
)
@pytest.mark.parametrize("name", SHAPES)
def test_norms(stack, name, rng, device, check):
    config = SHAPES[name]
    weights = twins.random_weights(config, rng, torch.bfloat16)
    calls = []
    recorder = outcomes.recording_norms(stack, calls)
    narrow = replace(config, compute_dtype=toys.require_bfloat16(stack))
    model = built(recorder, narrow, weights, device)
    model(random_batch(rng, config, "rows").to(device).microbatch.input_ids)
    parity.check_norms(check, calls, num_norms=2 * config.num_layers + 1)


@gate(
    claim="in bfloat16, over tokens far apart and far from position 0, the errors are at most 1.5 "
    "times those of transformers",
    roles=["build_model", "rope"],
    not_claimed="positions beyond 4096",
    source="transformers, which keeps frequencies and angles in float32; EleutherAI/gpt-neox#1003",
)
@pytest.mark.parametrize("theta", [1e4, 1e6], ids=["theta-1e4", "theta-1e6"])
def test_far_apart(stack, theta, rng, device, check):
    config = shape(64, (2, 2), 64, rope_theta=theta)
    narrow = replace(config, compute_dtype=toys.require_bfloat16(stack))
    weights = twins.random_weights(config, rng, torch.bfloat16)
    for name, weight in weights.items():
        if ".q_proj." in name:
            weight *= 4  # sharp attention: it depends on the angles, and does not average them
    batch = random_batch(rng, config, "rows", first_position=3000, shape=(1, 768))
    oracle_model = built(probes.REFERENCE, config, weights, "cpu").double()
    oracle = outcomes.of_stack(probes.REFERENCE, oracle_model, batch, gradients=False)
    twin = twins.load(twins.build(config, torch.bfloat16, device), weights)
    plain = outcomes.of_twin(twin, batch.to(device), gradients=False)
    model = built(stack, narrow, weights, device)
    got = outcomes.of_stack(stack, model, batch.to(device), gradients=False)
    parity.check_ratios(check, got, plain, oracle, k=1.5, whose="transformers")
