"""M1. Documents that share a row do not see each other, and each is what it is alone."""

from __future__ import annotations

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import relative_error
from reference.loss import NO_TARGET
from reference.window import Microbatch

FAMILIES = pytest.mark.parametrize("family", probes.FAMILIES)
SCALES = pytest.mark.parametrize("scale", [1.0, 3e5], ids=["scores-1", "scores-1e5"])
# Rows are cut at different places, the first nowhere; ids are names, in no order, and one document
# is one token long.
LENGTHS = [[24], [7, 1, 12, 4], [3, 9, 2, 10]]
NAMES = [[1], [7, 0, 900_000, 3], [1, 2, 0, 5]]
NUM_TOKENS = 24


def random_inputs(stack, rng, device, scale=1.0):
    q, k, v = (
        probes.random_heads(stack, rng, device, rows=3, tokens=NUM_TOKENS, heads=n, width=16)
        for n in (8, 2, 2)
    )
    return [(q * scale).requires_grad_(), k.requires_grad_(), v.requires_grad_()]


def spans():
    """(row, start, end) of every document."""
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


@gate(
    claim="attention has an exactly zero gradient across documents, however large the scores",
    roles=["attention"],
    not_claimed="documents whose tokens are not contiguous",
    source="DeepOpt-com/WrinkleFree-Monorepo#53: positions restarted, mask forgotten",
)
@SCALES
def test_operator(stack, scale, rng, device, check):
    inputs = random_inputs(stack, rng, device, scale)
    documents_BT = probes.documents_of(LENGTHS, NAMES)
    o_BTNH = stack.attention(*inputs, documents_BT.to(device))
    other = documents_BT[:, :, None] != documents_BT[:, None, :]
    for name, x in zip("qkv", inputs, strict=True):
        reach_Bts = probes.influence(o_BTNH, x, rng)
        check(f"gradient from {name} of other documents", reach_Bts[other].sum(), equal=0.0,
              because="a weight of exactly zero has a gradient of exactly zero")  # fmt: skip


@gate(
    claim="attention of a packed row is the attention of each document in a row of its own",
    roles=["attention"],
    not_claimed="positions, which enter before",
    source="huggingface/nanoVLM PR#204: a mask, not only positions, keeps samples apart",
)
def test_operator_alone(stack, rng, device, check):
    inputs = random_inputs(stack, rng, device)
    documents = probes.documents_of(LENGTHS, NAMES).to(device)
    packed = stack.attention(*inputs, documents)
    bound = toys.rounding(packed.dtype)
    for row, start, end in spans():
        part = [x[row : row + 1, start:end] for x in inputs]
        for what, ids in (("documents absent", None), ("one id", documents[row, None, start:end])):
            error = relative_error(packed[row, start:end], stack.attention(*part, ids)[0])
            check(f"relative difference to the document alone, {what}", error, at_most=bound,
                  because="the same sums in another order")  # fmt: skip


@gate(
    claim="document ids are names: another set of ids changes nothing, one id everywhere is none",
    roles=["attention"],
    not_claimed="one id for two separate documents of a row",
    source="huggingface/transformers PR#46634: an all-ones mask switched the document mask off",
)
def test_ids_are_names(stack, rng, device, check):
    inputs = [x.detach() for x in random_inputs(stack, rng, device)]
    want = stack.attention(*inputs, probes.documents_of(LENGTHS, NAMES).to(device)).clone()
    because = "ids are compared with each other and with nothing else"
    bound = toys.rounding(want.dtype)
    upwards, downwards = [0, 1, 2, 3], [3, 2, 1, 0]
    for names in (
        [[0], upwards, upwards],
        [[1], downwards, downwards],
        [[-1], [1, 0, -1, -100], [5, 6, 5000, 8]],
    ):
        got = stack.attention(*inputs, probes.documents_of(LENGTHS, names).to(device))
        check("change by other ids", relative_error(got, want), at_most=bound, because=because)
    absent = stack.attention(*inputs, None).clone()
    for name in (0, 1, -1, 77):
        one = torch.full((3, NUM_TOKENS), name, dtype=torch.int32, device=device)
        error = relative_error(stack.attention(*inputs, one), absent)
        check("one id everywhere against none", error, at_most=bound, because=because)


@gate(
    claim="a model's hidden states of a document do not change by one bit when another document of "
    "the row is replaced, in training and in evaluation mode",
    roles=["build_model", "attention", "rope"],
    not_claimed="rows of different lengths",
    source="DeepOpt-com/WrinkleFree-Monorepo#53: logits moved by up to 11.34, must be 0",
)
@pytest.mark.parametrize("mode", ["training", "evaluation"])
@FAMILIES
def test_replaced_document(stack, family, mode, rng, device, check):
    model = probes.built(stack, family, device, rng).train(mode == "training")
    documents_BT = probes.documents_of(LENGTHS, NAMES)
    positions = probes.restarted_positions(documents_BT).to(device)
    documents = documents_BT.to(device)
    input_ids = probes.random_ids(rng, 3, NUM_TOKENS).to(device)
    before = model(input_ids, positions, documents).detach()
    for row, start, end in spans():
        replaced = input_ids.clone()
        replaced[row, start:end] = (replaced[row, start:end] + 1) % probes.DECODER.vocabulary_size
        change_BT = (model(replaced, positions, documents) - before).detach().abs().amax(-1)
        check("change of the document itself", change_BT[row, start:end].min(), at_least=1e-6,
              because="each of its tokens was replaced")  # fmt: skip
        change_BT[row, start:end] = 0.0
        check(
            "change of other documents", change_BT.sum(), equal=0.0, because="no path leads there"
        )


@gate(
    claim="a model's hidden states of a packed document are those of the document in its own row, "
    "at positions from 0",
    roles=["build_model", "attention", "rope"],
    not_claimed="bitwise equality of two shapes",
    source="huggingface/nanoVLM#201: positions ran on across samples",
)
@FAMILIES
def test_document_alone(stack, family, rng, device, check):
    model = probes.built(stack, family, device, rng)
    documents_BT = probes.documents_of(LENGTHS, NAMES)
    positions = probes.restarted_positions(documents_BT).to(device)
    input_ids = probes.random_ids(rng, 3, NUM_TOKENS).to(device)
    packed = model(input_ids, positions, documents_BT.to(device)).detach()
    for row, start, end in spans():
        alone = model(input_ids[row : row + 1, start:end]).detach()[0]
        check("relative difference to the document alone",
              relative_error(packed[row, start:end], alone), at_most=toys.rounding(packed.dtype),
              because="the same sums in another order")  # fmt: skip


@gate(
    claim="padding with an id of its own leaves loss and gradients of the documents as they are "
    "without it, and finite",
    roles=["build_model", "attention", "token_nll"],
    not_claimed="NaN in the padding",
    source="pytorch/pytorch#41508: the gradient of a fully masked row is NaN",
)
@FAMILIES
def test_padding(stack, family, rng, device, check):
    model = probes.built(stack, family, device, rng)
    input_ids = probes.random_ids(rng, 2, NUM_TOKENS).to(device)
    positions = torch.arange(NUM_TOKENS, device=device).expand(2, -1)
    labels = input_ids.roll(-1, 1).clone()
    labels[:, 15:] = NO_TARGET
    got = {}
    for name, length, padding in (("without", 16, 4), ("-1", NUM_TOKENS, -1), ("0", NUM_TOKENS, 0)):
        documents = torch.full((2, length), 4, dtype=torch.int32, device=device)
        documents[:, 16:] = padding
        hidden = model(input_ids[:, :length], positions[:, :length], documents)
        nll_sum, num_targets = stack.token_nll(
            hidden.flatten(0, 1), model.lm_head.weight, labels[:, :length].flatten()
        )
        model.zero_grad()
        nll_sum.backward()
        check("targets", num_targets, equal=30, because="padding has no label")
        got[name] = toys.flat({"loss": nll_sum[None], **toys.gradients(model)})
    for name in ("-1", "0"):
        check("relative change of loss and gradients", relative_error(got[name], got["without"]),
              at_most=toys.rounding(toys.working_dtype(stack)),
              because="a padding token sees itself and is seen by no target")  # fmt: skip


def repeated_documents(rng, vocabulary_size):
    """Two copies of one random document a row; targets only in the second."""
    half = NUM_TOKENS // 2
    input_ids = torch.randint(vocabulary_size, (16, half), generator=rng).repeat(1, 2)
    labels = torch.full_like(input_ids, NO_TARGET)
    labels[:, half:-1] = input_ids[:, half + 1 :]
    documents = torch.tensor([3, 8]).int().repeat_interleave(half).expand(16, -1)
    positions = torch.arange(half).repeat(2).expand(16, -1)
    return Microbatch(input_ids, labels, positions, documents)


@gate(
    claim="a copy of a random document in the same row is not predicted better than by chance",
    roles=["build_model", "attention", "token_nll"],
    not_claimed="that there is no leak which one layer cannot learn to use in 80 updates",
    source="alex-hh/profam#495: 95 % of a repeated document were predicted instead of 5 %",
)
@FAMILIES
def test_a_copy_stays_unpredicted(stack, family, rng, device, check):
    losses = probes.loss_above_chance(stack, family, device, rng, repeated_documents)
    check.series("loss above ln V", losses)
    check("mean of the last 20, above ln V", sum(losses[-20:]) / 20, at_least=-0.05,
          because="below 0 is impossible; 3520 fresh targets, a standard error of 0.002",
          unit="nats")  # fmt: skip


@gate(
    claim="positions and documents of another shape than the tokens are refused",
    roles=["build_model"],
    not_claimed="positions of several axes, which the reference does not have",
    source="huggingface/transformers PR#44911: positions of 3 axes were read as 3 times the tokens",
)
@FAMILIES
def test_shapes(stack, family, device, check):
    model = stack.build_model(probes.FAMILIES[family], stack).to(device)
    input_ids = torch.zeros(2, 8, dtype=torch.int64, device=device)
    refused = 0
    wrong = [
        (torch.zeros(3, 2, 8, dtype=torch.int64), None),
        (torch.zeros(8, dtype=torch.int64), None),
        (None, torch.zeros(3, 2, 8, dtype=torch.int32)),
        (None, torch.zeros(2, 9, dtype=torch.int32)),
    ]
    for arguments in wrong:
        try:
            model(input_ids, *(x if x is None else x.to(device) for x in arguments))
        except ValueError:
            refused += 1
    check("refused with a ValueError", refused, equal=len(wrong), because="[B, T] as the tokens")
