"""M0. The ledger counts the parameters that the model has: published numbers and built models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gates import shapes
from harness import gate
from reference.config import PRESETS, preset

UNTIED_PLAN = replace(preset("plan-1.15b"), tied_head=False)
PUBLISHED = {
    "qwen2.5-0.5b": (preset("qwen2.5-0.5b"), 494_032_768),
    "qwen2.5-1.5b": (preset("qwen2.5-1.5b"), 1_543_714_304),
    "qwen2.5-3b": (preset("qwen2.5-3b"), 3_085_938_688),
    "qwen2.5-7b": (preset("qwen2.5-7b"), 7_615_616_512),
    "plan-1.15b": (preset("plan-1.15b"), 1_147_766_784),
    "plan-untied": (UNTIED_PLAN, 1_213_302_784),
    "chargpt-smoke": (preset("chargpt-smoke"), 62_880),
    "chargpt-default": (preset("chargpt-default"), 10_734_336),
}
NOT_CLAIMED = "that the parameters are trained or initialised well"


@gate(
    claim="the published configurations have the published numbers of parameters",
    roles=["parameter_count"],
    not_claimed=NOT_CLAIMED,
    source="the Qwen2.5 model cards and configuration files, the 1.15B plan, the character GPT's "
    "2VD + TD + L(12 D^2 + 13 D) + 2D",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published(stack, check, name):
    config, total = PUBLISHED[name]
    check("parameters", stack.parameter_count(config).total, equal=total, because="an integer")


@gate(
    claim="the parts of the plan and of 7B are the published parts",
    roles=["parameter_count"],
    not_claimed=NOT_CLAIMED,
    source="per layer D H (2N + 2K), 3 D F, 2 D; final norm D; vocabulary V D",
)
def test_parts(stack, check):
    plan = stack.parameter_count(preset("plan-1.15b"))
    layers = preset("plan-1.15b").num_layers
    exact = "an integer of the plan"
    check("attention, all layers", plan.attention, equal=layers * 10_485_760, because=exact)
    check("SwiGLU, all layers", plan.feed_forward, equal=layers * 34_603_008, because=exact)
    check("norms", plan.norms, equal=layers * 4_096 + 2_048, because=exact)
    check("vocabulary table", plan.embedding, equal=65_536_000, because=exact)
    check("head of the tied model", plan.head, equal=0, because="the same table, counted once")
    check("biases of the plan", plan.biases, equal=0, because="it has none")
    seven = stack.parameter_count(preset("qwen2.5-7b"))
    check("7B without vocabulary tables", seven.without_vocabulary, equal=6_525_621_760,
          because="two tables of an untied model are left out")  # fmt: skip


@gate(
    claim="the formula counts, part by part, what the built model of every preset has",
    roles=["parameter_count", "build_model"],
    not_claimed=NOT_CLAIMED,
    source="the parameters of the model on the meta device; a shared one counts once",
)
@pytest.mark.parametrize("name", PRESETS)
def test_built_presets(stack, check, name):
    compare_with_built(stack, check, PRESETS[name])


@gate(
    claim="the formula counts what any decoder has: any head width, grouping, bias and head",
    roles=["parameter_count", "build_model"],
    not_claimed=NOT_CLAIMED,
    source="allenai/OLMo-core PR#478: head width taken as D / N, one up projection, width D for "
    "keys and values all agree with some configuration and not with others",
)
def test_any_decoder(stack, check, for_all):
    @for_all(config=shapes.decoders(), max_examples=40)
    def _(config):
        compare_with_built(stack, check, config)


@gate(
    claim="the formula counts what any character GPT has",
    roles=["parameter_count", "build_model"],
    not_claimed=NOT_CLAIMED,
    source="2VD + TD + L(12 D^2 + 13 D) + 2D",
)
def test_any_chargpt(stack, check, for_all):
    @for_all(config=shapes.chargpts(), max_examples=20)
    def _(config):
        compare_with_built(stack, check, config)


@gate(
    claim="every parameter is in one group: matrices decay, biases and gains do not",
    roles=["param_groups", "parameter_count"],
    not_claimed="that decaying matrices only is best",
    source="ServiceNow/Fast-LLM#542: after a refactor gains and biases decayed too",
)
@pytest.mark.parametrize("name", ["bytes-0.09m", "qwen2.5-0.5b", "chargpt-smoke"])
def test_decay_groups(stack, check, name):
    with torch.device("meta"):
        model = stack.build_model(preset(name), stack)
    count = stack.parameter_count(preset(name))
    decays, stays = stack.param_groups(model, 0.1)
    listed = [parameter for group in (decays, stays) for parameter in group["params"]]
    check("listed twice", len(listed) - len(set(listed)), equal=0, because="one group each")
    check("decayed", sum(p.numel() for p in decays["params"]), equal=count.decayed,
          because="the ledger's elements of two-dimensional parameters")  # fmt: skip
    check("not decayed", sum(p.numel() for p in stays["params"]), equal=count.undecayed,
          because="the ledger's biases and gains")  # fmt: skip
    check("decay of gains", float(stays["weight_decay"]), equal=0.0, because="the second group")


@gate(
    claim="the angles in the built model are the ledger's: theta comes from the configuration",
    roles=["build_model", "rope", "rotary_frequencies"],
    not_claimed="angles at far positions (m1_positions)",
    source="lyogavin/airllm PR#369: theta of the configuration lost, 1e4 used",
)
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rope_theta(stack, check, device, theta):
    head_width = 16
    config = replace(preset("bytes-0.09m"), rope_theta=theta, head_width=head_width)
    want = stack.rotary_frequencies(config)
    check("pairs", len(want), equal=head_width // 2, because="one frequency for two components")
    used = angles_used(stack, config, device)
    for index, (got, angle) in enumerate(zip(used, want, strict=True)):
        check("radians a position, relative error", abs(got / angle - 1), at_most=1e-5,
              because="float32 angles at position 1")  # fmt: skip
        check("ledger's own relative error", abs(angle / theta ** (-2 * index / head_width) - 1),
              at_most=1e-12, because="theta^(-2i/H) in float64")  # fmt: skip


def angles_used(stack, config, device):
    """The angle by which the model's own rope call turns each pair from position 0 to 1."""
    angles = []

    def probe(q_BTNH, k_BTKH, positions_BT, theta):
        ones = torch.zeros_like(q_BTNH)
        ones[..., : config.head_width // 2] = 1.0  # every pair is (1, 0)
        turned, _ = stack.rope(ones, k_BTKH, positions_BT, theta)
        first, second = turned[0, 1, 0].detach().cpu().double().chunk(2)
        angles[:] = torch.atan2(second, first).tolist()
        return stack.rope(q_BTNH, k_BTKH, positions_BT, theta)

    model = stack.build_model(config, stack.replace({"rope": probe})).to(device)
    model(torch.zeros(1, 2, dtype=torch.int64, device=device))
    return angles


def compare_with_built(stack, check, config):
    """Check every part of the formula against the model on the meta device."""
    with torch.device("meta"):
        model = stack.build_model(config, stack)
    built = dict.fromkeys(
        ["embedding", "positions", "attention", "feed_forward", "head", "biases", "norms"], 0
    )
    for name, parameter in model.named_parameters():  # a tied table comes once, as the embedding
        built[part_of(name, parameter)] += parameter.numel()
    count = stack.parameter_count(config)
    for part, number in built.items():
        check(part, getattr(count, part), equal=number, because="the built model has as many")
    check("total", count.total, equal=sum(p.numel() for p in model.parameters()),
          because="every parameter of the built model, a shared one once")  # fmt: skip
    check("2-D", count.decayed, equal=sum(p.numel() for p in model.parameters() if p.ndim > 1),
          because="matrices of the built model")  # fmt: skip


def part_of(name, parameter):
    """The part of the ledger to which a parameter of either model family belongs."""
    if name.startswith("embed_tokens"):
        return "embedding"
    if name.startswith("embed_positions"):
        return "positions"
    if name.startswith("lm_head"):
        return "head"
    if "norm" in name:
        return "norms"
    if parameter.ndim == 1:
        return "biases"
    return "attention" if "self_attn" in name else "feed_forward"
