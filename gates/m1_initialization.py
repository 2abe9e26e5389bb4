"""M1. What a model starts from: independent draws, a loss near ln V, a gradient for everything."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from gates import ladder, probes, toys
from harness import gate
from reference.config import preset
from reference.loss import NO_TARGET
from reference.window import Microbatch, Window

SHAPES = pytest.mark.parametrize("shape", ["rung", "rung-untied", "chargpt"])
FAMILIES = pytest.mark.parametrize("family", probes.FAMILIES)


def config_of(shape, rung):
    if shape == "chargpt":
        return preset("chargpt-smoke")
    return replace(ladder.one_layer(rung), tied_head=shape == "rung")


@gate(
    claim="the first loss is near ln V: the model starts without an opinion",
    roles=["build_model", "token_nll"],
    not_claimed="that labels are the right ones: uniform logits hide a shift (m1_labels)",
    source="PiotrNawrot/nanoT5#25: an untied head drawn with a deviation of 1 began at 110",
)
@SHAPES
def test_first_loss(stack, shape, rung, rng, device, check):
    config = config_of(shape, rung)
    model = stack.build_model(config, stack).to(device)
    tokens = torch.randint(config.vocabulary_size, (16, 33), generator=rng).to(device)
    hidden = model(tokens[:, :-1])
    nll_sum, num_targets = stack.token_nll(
        hidden.flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten()
    )
    distance = float(nll_sum.detach() / num_targets) - math.log(config.vocabulary_size)
    # Half the variance of the logits, D std^2, and 512 targets drawn among them.
    variance = config.model_width * config.initializer_std**2
    check("first loss above ln V", distance,
          within=(-4 * math.sqrt(variance / 512), 0.1 + variance),
          because="logits of variance D std^2 add half of it; drawn targets scatter by "
          "sqrt(D std^2 / 512)", unit="nats")  # fmt: skip


@gate(
    claim="every matrix is its own draw with mean 0 and the configured deviation; gains are 1, "
    "biases 0",
    roles=["build_model"],
    not_claimed="the shape of the distribution",
    source="tinygrad/tinygrad PR#16623: gate and up began equal",
)
@SHAPES
def test_draws(stack, shape, rung, device, check):
    config = replace(config_of(shape, rung), num_layers=2)
    if shape != "chargpt":
        config = replace(config, qkv_bias=True)
    model = stack.build_model(config, stack).to(device)
    matrices = {n: p.detach().double() for n, p in model.named_parameters() if p.dim() == 2}
    for name, matrix in matrices.items():
        scatter = 6 / math.sqrt(matrix.numel())
        check("mean over deviation", matrix.mean() / config.initializer_std,
              within=(-scatter, scatter), because=f"6 standard errors, {name}")  # fmt: skip
        check("deviation over the configured one", matrix.std() / config.initializer_std,
              within=(1 - scatter, 1 + scatter), because=f"8 standard errors, {name}")  # fmt: skip
    for one, other in itertools.combinations(matrices, 2):
        x, y = matrices[one].flatten(), matrices[other].flatten()
        if x.shape == y.shape:
            correlation = torch.nn.functional.cosine_similarity(x, y, dim=0).abs()
            check("correlation of two matrices", correlation * math.sqrt(x.numel()), at_most=6.0,
                  because="independent draws: 6 standard errors of 1 / sqrt(elements)")  # fmt: skip
    vectors = {n: p.detach() for n, p in model.named_parameters() if p.dim() == 1}
    gains = [p for n, p in vectors.items() if n.endswith("norm.weight")]
    biases = [p for n, p in vectors.items() if n.endswith("bias")]
    check("vectors", len(gains) + len(biases), equal=len(vectors), because="gains and biases")
    check("largest |gain - 1|", max((g - 1).abs().max() for g in gains), equal=0.0,
          because="a norm starts as the plain norm")  # fmt: skip
    check("largest |bias|", max(b.abs().max() for b in biases), equal=0.0, because="no preference")


@gate(
    claim="every parameter receives a finite gradient that is not zero, in the forward of training",
    roles=["build_model", "rms_norm", "rope", "attention", "swiglu", "linear", "token_nll"],
    not_claimed="that the gradient is right (m1_model)",
    source="huggingface/candle#2168: a fast path of the norm without a backward; "
    "feifeibear/long-context-attention#166: an attention without autograd",
)
@pytest.mark.parametrize("compute", ["own", "bfloat16"])
@FAMILIES
def test_every_parameter_has_a_gradient(stack, family, compute, rng, device, check):
    dtype = toys.require_bfloat16(stack) if compute == "bfloat16" else None
    config = replace(probes.FAMILIES[family], compute_dtype=dtype)
    model = stack.build_model(config, stack).to(device)
    tokens = probes.random_ids(rng, 4, 33).to(device)
    hidden = model(tokens[:, :-1])
    nll_sum, num_targets = stack.token_nll(
        hidden.flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten()
    )
    (nll_sum / num_targets).backward()
    because = "each is on the way to the loss"
    without = [n for n, p in model.named_parameters() if p.grad is None]
    check("parameters without a gradient", without, equal=[], because=because)
    zero = [
        name
        for name, parameter in model.named_parameters()
        if not name.endswith(probes.without_gradient(family))
        and not parameter.grad.abs().max() > 0  # NaN too
    ]
    check("parameters with a gradient of zero or NaN", zero, equal=[], because=because)


@gate(
    claim="one update moves every parameter",
    roles=["build_model", "accumulate", "param_groups", "optimizer_step", "attention", "rms_norm"],
    not_claimed="that the update is the right one (m2_optimizer)",
    source="huggingface/candle PR#3526: the loss fell and the step succeeded, half the model stood",
)
@FAMILIES
def test_every_parameter_moves(stack, family, rng, device, check):
    model = stack.build_model(probes.FAMILIES[family], stack).to(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = probes.random_ids(rng, 4, 33)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = NO_TARGET
    positions = torch.arange(32).expand(4, -1)
    window = Window((Microbatch(tokens[:, :-1], labels, positions),)).to(device)
    stack.accumulate(model, window, None)
    stack.optimizer_step(stack.param_groups(model, 0.0), {}, 1e-2, (0.9, 0.95), 1e-12)
    still = [n for n, p in model.named_parameters() if not (p.detach() != before[n]).any()]
    check("parameters that stood still", still, equal=[], because="without decay, by the gradient")
    worst = max(float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters())
    check("largest move", worst, at_most=1.001e-2,
          because="Adam's first step is the learning rate")  # fmt: skip
