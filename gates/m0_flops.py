"""M0. The ledger's FLOPs: published numbers, and the matrix products of a traced model, exactly.

The trace counts every matrix product of a forward and backward pass with torch's FlopCounterMode.
Attention is put on torch's unfused path, since a fused kernel is counted with its recomputation or
not at all; that path takes the full score matrix, so the trace is compared under kappa 12.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gates import shapes
from harness import gate
from reference.config import DecoderConfig, preset
from reference.ledger.flops import FlopsConvention

PLAN_TOKENS = 23_000_000_000
COUNTED = FlopsConvention("products", 12)
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
NOT_CLAIMED = "softmax, norms, rotary angles, activations, the optimizer; how fast it runs"


@gate(
    claim="the plan costs 1.58e20 FLOPs by its parameters, 1.86e20 and 2.14e20 with attention",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="6P + kappa L T D a token, P = 1,147,766,784, 23e9 tokens, T 4096",
)
@pytest.mark.parametrize(
    ("kappa", "per_token", "total"),
    [
        (0, 6_886_600_704, 158_391_816_192_000_000_000),
        (6, 8_094_560_256, 186_174_885_888_000_000_000),
        (12, 9_302_519_808, 213_957_955_584_000_000_000),
    ],
    ids=["0", "6", "12"],
)
def test_plan(stack, check, kappa, per_token, total):
    convention = FlopsConvention("parameters", kappa)
    flops = stack.training_flops(preset("plan-1.15b"), PLAN_TOKENS, 4096, convention)
    check("FLOPs a token", flops.model_per_token, equal=per_token, because="an integer of the plan")
    check("FLOPs", flops.model_total, equal=total, because="an integer of the plan")
    check("convention", flops.convention == convention, equal=True, because="kept with the number")
    check("kappa in words", f"{kappa} L T N H" in flops.convention.text, equal=kappa > 0,
          because="a reader must see what was counted")  # fmt: skip


@gate(
    claim="7B costs 6 FLOPs a parameter and token",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="6 N D; with the model card's rounded 7.61e9 parameters it is 4.566e20",
)
def test_seven_billion(stack, check):
    convention = FlopsConvention("parameters", 0)
    flops = stack.training_flops(preset("qwen2.5-7b"), 10**10, 4096, convention)
    check("FLOPs", flops.model_total, equal=6 * 7_615_616_512 * 10**10, because="6 N D")
    rounded = flops.model_total * 7.61e9 / 7_615_616_512
    check("with 7.61e9 parameters", rounded / 1e20, within=(4.5655, 4.5665), because="4.566")


@gate(
    claim="attention of 12 layers, width 768, 1024 tokens costs 1.13e8 FLOPs a token, causal half",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="pytorch/torchtitan PR#280: 12 L T D against 6 L T D",
)
@pytest.mark.parametrize(("kappa", "want"), [(12, 113_246_208), (6, 56_623_104)], ids=["12", "6"])
def test_attention_factor(stack, check, kappa, want):
    config = DecoderConfig(50304, 768, 2048, 12, 12, 12, 64, 1024)
    flops = stack.training_flops(config, 1024, 1024, FlopsConvention("parameters", kappa))
    check("attention, FLOPs a token", flops.attention_per_token, equal=want, because="integer")


@gate(
    claim="the formula equals the counted matrix products of the traced model, exactly",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="FlopCounterMode over forward and backward, unfused attention, full score matrix",
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_traced(stack, check, tied, heads):
    config = DecoderConfig(37, 24, 40, 2, *heads, 10, 64, qkv_bias=True, tied_head=tied)
    compare_with_trace(stack, check, config, num_rows=3, context_tokens=17)


@gate(
    claim="the formula equals the counted products of the presets, exactly",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="FlopCounterMode on the meta device, unfused attention, full score matrix",
)
@pytest.mark.parametrize("name", ["plan-1.15b", "qwen2.5-7b", "bytes-0.09m", "chargpt-default"])
def test_traced_presets(stack, check, name):
    config = preset(name)
    compare_with_trace(stack, check, config, 2, min(config.max_positions, 4096))


@gate(
    claim="the formula equals the counted products of any small model, exactly",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="allenai/OLMo-core PR#478: head width D / N, one up projection, ungrouped heads",
)
def test_any_traced(stack, check, for_all):
    @for_all(
        config=st.one_of(shapes.decoders(), shapes.chargpts()),
        num_rows=st.sampled_from([2, 1, 3]),
        context_tokens=st.integers(1, 8),
        max_examples=25,
    )
    def _(config, num_rows, context_tokens):
        compare_with_trace(stack, check, config, num_rows, context_tokens)


@gate(
    claim="layers that run forward twice cost what the traced model computes twice, and only the "
    "hardware's number grows",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="FlopCounterMode over torch.utils.checkpoint around every layer, without early stop",
)
@pytest.mark.parametrize("name", ["bytes-0.09m", "chargpt-smoke"])
def test_recomputed_layers(stack, check, name):
    config, context_tokens = preset(name), 32
    again = FlopsConvention("products", 12, recompute_layers=True)
    once = stack.training_flops(config, context_tokens, context_tokens, COUNTED)
    twice = stack.training_flops(config, context_tokens, context_tokens, again)
    counted = counted_products(config, 1, context_tokens, run_layers_twice=True)
    check("hardware FLOPs", twice.hardware_total, equal=counted, because="as traced")
    check("model FLOPs", twice.model_total, equal=once.model_total,
          because="what the objective needs does not grow")  # fmt: skip
    check("nothing run twice", once.hardware_total, equal=once.model_total, because="equal then")


@gate(
    claim="scores taken again in the backward pass cost 1/6 of attention, as in a fused kernel",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="torch.utils.flop_counter's formulas for fused attention: 2 products forward, 5 back",
)
@pytest.mark.parametrize("kappa", [6, 12])
def test_recomputed_scores(stack, check, kappa):
    config, T = preset("bytes-0.09m"), 48
    shape = (1, config.num_query_heads, T, config.head_width)
    fused = sdpa_flop_count(shape, shape, shape)
    fused += sdpa_backward_flop_count(shape, shape, shape, shape)
    fused = fused * config.num_layers * kappa // 12  # torch charges the full score matrix
    convention = FlopsConvention("products", kappa, recompute_scores=True)
    flops = stack.training_flops(config, T, T, convention)
    check("attention and recomputation",
          (flops.attention_per_token + flops.recomputed_per_token) * T, equal=fused,
          because="7 products a head")  # fmt: skip
    check("attention", flops.attention_per_token * T, equal=fused * 6 // 7,
          because="the objective needs 6 of the 7 products")  # fmt: skip


@gate(
    claim="FLOPs are per token and add up: over tokens, over parts, and over conventions",
    roles=["training_flops"],
    not_claimed=NOT_CLAIMED,
    source="sums of integers",
)
def test_any_sum(stack, check, for_all):
    @for_all(
        config=st.one_of(shapes.decoders(), shapes.chargpts()),
        num_tokens=st.integers(1, 10**15),
        context_tokens=st.integers(1, 8),
        max_examples=60,
    )
    def _(config, num_tokens, context_tokens):
        count = shapes.REFERENCE.parameter_count(config)
        weights = {"parameters": count.total, "products": count.multiplying}
        for kind, kappa in itertools.product(weights, (0, 6, 12)):
            convention = FlopsConvention(kind, kappa)
            flops = stack.training_flops(config, num_tokens, context_tokens, convention)
            check("FLOPs", flops.model_total, equal=flops.model_per_token * num_tokens,
                  because="the same for every token")  # fmt: skip
            check("weights", flops.weights_per_token, equal=6 * weights[kind],
                  because="3 products, 2 FLOPs a multiply-add")  # fmt: skip
            parts = flops.weights_per_token + flops.attention_per_token
            check("parts", flops.model_per_token, equal=parts, because="the sum of the parts")
            check("as asked", flops.convention == convention, equal=True, because="kept with it")


def compare_with_trace(stack, check, config, num_rows, context_tokens):
    num_tokens = num_rows * context_tokens
    flops = stack.training_flops(config, num_tokens, context_tokens, COUNTED)
    check("FLOPs", flops.model_total, equal=counted_products(config, num_rows, context_tokens),
          because="every matrix product, forward and backward")  # fmt: skip


@functools.cache
def counted_products(config, num_rows, context_tokens, run_layers_twice=False):
    """FLOPs of all matrix products of a forward and backward pass, with the loss on every token."""
    reference = shapes.REFERENCE
    with torch.device("meta"):
        model = reference.build_model(config, reference)
        input_ids_BT = torch.zeros(num_rows, context_tokens, dtype=torch.int64)
    if run_layers_twice:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    unfused = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, unfused, set_checkpoint_early_stop(False):
        hidden_MD = model(input_ids_BT).flatten(0, 1)
        labels_M = input_ids_BT.flatten()
        nll_sum, _ = reference.token_nll(hidden_MD, model.lm_head.weight, labels_M)
        nll_sum.backward()
    others = {str(kind) for kind in counter.get_flop_counts()["Global"]} - PRODUCTS
    if others:
        raise RuntimeError(f"the trace met {others}, which is no plain matrix product")
    return counter.get_total_flops()
