"""M1. A token depends on itself, on every token before it, and on nothing after it."""

from __future__ import annotations

import pytest
import torch

from gates import probes
from harness import gate
from reference.window import Microbatch

NUM_TOKENS = 24
# Beyond the -1e4 that masks are filled with, once a learned score is large enough.
SCALES = pytest.mark.parametrize("scale", [1.0, 3e5], ids=["scores-1", "scores-1e5"])
MODES = pytest.mark.parametrize("mode", ["training", "evaluation"])
FAMILIES = pytest.mark.parametrize("family", probes.FAMILIES)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["row", "packed"])
AFTER = "a weight of exactly zero has a gradient of exactly zero; anything else reads the target"


def heads_and_documents(stack, rng, device, scale, packed):
    q, k, v = (
        probes.random_heads(stack, rng, device, rows=2, tokens=NUM_TOKENS, heads=n, width=16)
        for n in (8, 2, 2)
    )
    documents_BT = torch.zeros(2, NUM_TOKENS, dtype=torch.int32)
    if packed:
        documents_BT = probes.documents_of([[1, 13, 10], [16, 8]])
    inputs = [(q * scale).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    return inputs, documents_BT, documents_BT.to(device) if packed else None


@gate(
    claim="attention has an exactly zero gradient from every later token, however large the scores",
    roles=["attention"],
    not_claimed="that what it computes from earlier tokens is right (m1_attention)",
    source="karpathy/minGPT#75: a learned score beats a mask value of -1e4; section 3.2.3 of "
    "Vaswani et al. 2017",
)
@PACKED
@SCALES
def test_operator(stack, scale, packed, rng, device, check):
    inputs, _, documents = heads_and_documents(stack, rng, device, scale, packed)
    q, k, v = inputs
    scores = torch.einsum("btnh,bsnh->bnts", q[:, :, ::4], k) / 4.0
    check("largest score", scores.abs().max(), at_least=scale,
          because="a mask value of -1e4 is passed only by scores beyond it")  # fmt: skip
    o_BTNH = stack.attention(q, k, v, documents)
    check("shape", list(o_BTNH.shape), equal=list(q.shape), because="one output a query")
    later = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    for name, x in zip("qkv", inputs, strict=True):
        reach_Bts = probes.influence(o_BTNH, x, rng)
        check(f"gradient from later {name}", reach_Bts[:, later].sum(), equal=0.0, because=AFTER)


@gate(
    claim="attention changes no earlier output by one bit when later queries, keys and values do",
    roles=["attention"],
    not_claimed="equality of two different shapes",
    source="the definition of a causal model: p(x_t | x_<t)",
)
@PACKED
@SCALES
def test_replaced_future(stack, scale, packed, rng, device, check):
    inputs, _, documents = heads_and_documents(stack, rng, device, scale, packed)
    before = stack.attention(*inputs, documents).detach()
    for t in (1, 9, NUM_TOKENS - 1):
        others = [x.detach().clone() for x in inputs]
        for x in others:
            x[:, t:] = 100 * x[:, t:].flip(1) + 1
        change = (stack.attention(*others, documents) - before)[:, :t].abs().max()
        check("change of an earlier output", change, equal=0.0,
              because="the same shapes and the same numbers up to t")  # fmt: skip


@gate(
    claim="attention is reached by every earlier token of the document and by the token itself",
    roles=["attention"],
    not_claimed="sliding windows, which the reference does not have",
    source="huggingface/transformers#39408 (W or W + 1 keys), pytorch/pytorch#103082 (the causal "
    "flag of a chunk of queries is aligned to the first key)",
)
@PACKED
def test_nothing_is_forgotten(stack, packed, rng, device, check):
    inputs, documents_BT, documents = heads_and_documents(stack, rng, device, 1.0, packed)
    o_BTNH = stack.attention(*inputs, documents)
    reach_Bts = probes.influence(o_BTNH, inputs[2], rng)
    missing = int((~(reach_Bts > 0) & probes.visible(documents_BT)).sum())
    check("earlier tokens without influence", missing, equal=0,
          because="a softmax of finite scores has no zero in float64 or float32")  # fmt: skip


@gate(
    claim="each layer by itself, in training and in evaluation mode, is reached by every earlier "
    "token and has an exactly zero gradient from every later one",
    roles=["build_model", "attention"],
    not_claimed="dropout, caches of keys and values",
    source="huggingface/transformers#31673: only every second layer looked ahead; #48745: only "
    "some classes did",
)
@PACKED
@MODES
@FAMILIES
def test_layers(stack, family, mode, packed, rng, device, check):
    model = probes.built(stack, family, device, rng).train(mode == "training")
    documents_BT = torch.zeros(2, NUM_TOKENS, dtype=torch.int32)
    if packed:
        documents_BT = probes.documents_of([[1, 13, 10], [16, 8]])
    input_ids = probes.random_ids(rng, 2, NUM_TOKENS).to(device)
    positions = probes.restarted_positions(documents_BT).to(device)
    arguments = (input_ids, positions, documents_BT.to(device) if packed else None)
    layers, _ = probes.layers_cut_apart(model, *arguments)
    check("layers seen", len(layers), equal=model.config.num_layers, because="model.layers")
    later = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    for index, (x_BTD, y_BTD) in enumerate(layers):
        reach_Bts = probes.influence(y_BTD, x_BTD, rng)
        check(f"gradient from later tokens, layer {index}", reach_Bts[:, later].sum(), equal=0.0,
              because=AFTER)  # fmt: skip
        missing = int((~(reach_Bts > 0) & probes.visible(documents_BT)).sum())
        check(f"earlier tokens without influence, layer {index}", missing, equal=0,
              because="full attention inside the document")  # fmt: skip
    for index, (x_BTD, y_BTD) in enumerate(
        probes.layers_cut_apart(probes.sharpened(model, 1e3), *arguments)[0]
    ):
        reach_Bts = probes.influence(y_BTD, x_BTD, rng)
        check(f"gradient from later tokens, scores in the 1e5, layer {index}",
              reach_Bts[:, later].sum(), equal=0.0, because=AFTER)  # fmt: skip


def random_rows(rng, vocabulary_size):
    tokens_BT = torch.randint(vocabulary_size, (16, NUM_TOKENS + 1), generator=rng)
    positions_BT = torch.arange(NUM_TOKENS).expand(16, NUM_TOKENS)
    return Microbatch(tokens_BT[:, :-1], tokens_BT[:, 1:].contiguous(), positions_BT)


@gate(
    claim="random tokens are not predicted better than by chance after training on such",
    roles=["build_model", "attention", "token_nll"],
    not_claimed="that there is no leak which one layer cannot learn to use in 80 updates",
    source="huggingface/transformers#48745: the loss fell to 0 on random tokens",
)
@FAMILIES
def test_random_tokens_stay_unpredicted(stack, family, rng, device, check):
    losses = probes.loss_above_chance(stack, family, device, rng, random_rows)
    check.series("loss above ln V", losses)
    check("mean of the last 20, above ln V", sum(losses[-20:]) / 20, at_least=-0.05,
          because="below 0 is impossible; 7680 fresh targets, a standard error of 0.001",
          unit="nats")  # fmt: skip
