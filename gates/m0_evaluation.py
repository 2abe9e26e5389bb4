"""M0. Held-out nats, perplexity and bits per byte are sums over sums."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import nn

from gates import toys
from harness import gate
from reference.window import Window

NOT_CLAIMED = "that the held-out text is not in the training text"
FLOAT32 = "sums of a few numbers in float32"


def scored(stack, device, nats, *microbatches):
    """evaluate on a model in which a target of token i costs nats[i]."""
    model = toys.LinearLoss([[value] for value in nats], start_D=[1.0]).to(device)
    return stack.evaluate(model, [toys.rows(m).to(device) for m in microbatches])


def near(value, error=1e-5):
    return {"within": (value * (1 - error), value * (1 + error))}


@gate(
    claim="2.3 nats a token at 4 bytes a token are 0.8295 bits per byte",
    roles=["evaluate"],
    not_claimed=NOT_CLAIMED,
    source="BPB = nats / (bytes ln 2) = 2.3 / (4 ln 2)",
)
def test_bits_per_byte(stack, device, check):
    score = scored(stack, device, [2.3], toys.row([0] * 5, num_targets=5, num_bytes=20))
    check("bits per byte", score.bits_per_byte, **near(2.3 / (4 * math.log(2))), because="0.8295")
    check("targets", score.num_tokens, equal=5, because="the labels that are not -100")
    check("bytes", score.num_bytes, equal=20, because="what the source says")
    check("nats", score.nats, **near(11.5), because=FLOAT32)


@gate(
    claim="sums 2 over 1 target and 90 over 9 have the mean 9.2 and the perplexity 9897",
    roles=["evaluate"],
    not_claimed=NOT_CLAIMED,
    source="pytorch/torchtitan PR#4167: the mean of the batches' means is 6.0, perplexity 403",
)
def test_unequal_batches(stack, device, check):
    score = scored(
        stack, device, [2.0, 10.0], toys.row([0, 1, 1], num_targets=1), toys.row([1] * 9)
    )
    check("nats per token", score.nats / score.num_tokens, **near(9.2), because=FLOAT32)
    check("perplexity", score.perplexity, **near(math.exp(9.2), 1e-4), because="exp of 9.2")


@gate(
    claim="losses 2, 3 and 4 have the perplexity exp(3) = 20.09",
    roles=["evaluate"],
    not_claimed=NOT_CLAIMED,
    source="PPL = exp(sum nats / sum tokens); the mean of the exponentials is 27.36 "
    "(magenta/magenta PR#239)",
)
def test_perplexity(stack, device, check):
    score = scored(stack, device, [2.0, 3.0, 4.0], toys.row([0, 1, 2]))
    check("perplexity", score.perplexity, **near(math.exp(3), 1e-4), because="exp(mean)")


@gate(
    claim="the bytes are those of the source, also where tokens are no valid text or carry spaces",
    roles=["evaluate"],
    not_claimed="that the packer counted the source right (m1_packing)",
    source="karpathy/nanochat PR#693: byte 0x80 decoded and encoded again is 3 bytes; "
    "openai/parameter-golf#897: leading spaces counted twice",
)
def test_bytes_of_the_source(stack, device, check):
    texts = [b"\x80\xff\xfe", b" a  b ", "né€".encode()]
    microbatches = [toys.row(list(t), num_bytes=len(t)) for t in texts]
    microbatches.append(toys.row([256, 97], num_targets=1, num_bytes=0))  # an end of document
    score = scored(stack, device, [1.0] * 257, *microbatches)
    size = sum(len(text) for text in texts)
    check("bytes", score.num_bytes, equal=size, because="the size of the raw text: 3 + 6 + 6")
    check(
        "bits per byte",
        score.bits_per_byte,
        **near((size + 1) / size / math.log(2)),
        because="one nat a target; the end of document costs a nat and has no byte",
    )


@gate(
    claim="a document's nats are its own, wherever its parts stand, and all add up to the total",
    roles=["evaluate"],
    not_claimed=NOT_CLAIMED,
    source="a comparison by document needs the whole document and nothing else",
)
def test_documents(stack, device, check):
    nats = [1.0, 2.0, 4.0, 8.0]
    score = scored(
        stack,
        device,
        nats,
        toys.row([0, 0, 1, 3], num_targets=3, documents=[7, 7, 9, 5]),
        toys.row([1, 2, 2, 0], documents=[9, 9, 7, 4]),
    )
    want = {4: (1.0, 1), 7: (6.0, 3), 9: (8.0, 3)}
    check("documents", sorted(score.per_document), equal=sorted(want),
          because="those with targets; the row's tail is none")  # fmt: skip
    for document, (sum_nats, num_tokens) in want.items():
        found = score.per_document[document]
        check(f"nats of document {document}", found.nats, **near(sum_nats), because=FLOAT32)
        check(f"targets of document {document}", found.num_tokens, equal=num_tokens,
              because="its labels that are not -100, in both rows")  # fmt: skip
    check("sum over documents / total", sum(d.nats for d in score.per_document.values())
          / score.nats, **near(1.0), because=FLOAT32)  # fmt: skip


@gate(
    claim="the score does not depend on how rows are put into microbatches and windows",
    roles=["evaluate"],
    not_claimed="rounding in low precision",
    source="a sum over targets does not know of batches",
)
def test_any_batches(stack, rng, device, check, for_all):
    model = toys.tiny_model(stack, device, num_layers=1)
    bound = max(toys.rounding(toys.working_dtype(stack)), 1e-6)

    @for_all(
        counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
        k=st.integers(1, 6),
        max_examples=15,
    )
    def _(counts, k):
        window = toys.ragged_window(rng, counts, num_tokens=6)
        parts = window.split(min(k, len(counts))).microbatches
        loss, _ = toys.token_mean(model, window)
        cuts = {
            "one window": [Window(parts)],
            "a window a microbatch": [Window((part,)) for part in parts],
        }
        for name, windows in cuts.items():
            score = stack.evaluate(model, [w.to(device) for w in windows])
            check("targets", score.num_tokens, equal=sum(counts), because="labels not -100")
            check(f"relative error of the mean, {name}", abs(score.nats / sum(counts) / loss - 1),
                  at_most=bound, because="the same sum, kept in float32 or wider")  # fmt: skip


class WithDropout(toys.LinearLoss):
    """A LinearLoss whose hidden states are dropped in training mode."""

    def forward(self, input_ids, positions=None, documents=None):
        hidden = super().forward(input_ids, positions, documents)
        return nn.functional.dropout(hidden, 0.5, self.training)


@gate(
    claim="scoring changes nothing: no gradient, no weight, no mode; and dropout is off",
    roles=["evaluate"],
    not_claimed=NOT_CLAIMED,
    source="a held-out score is a function of the weights",
)
def test_leaves_no_trace(stack, device, check):
    window = toys.rows(toys.row([0] * 50)).to(device)
    for training in (True, False):
        model = WithDropout([[1.0]], start_D=[1.0]).to(device).train(training)
        score = stack.evaluate(model, [window])
        check("nats", score.nats, equal=50.0, because="50 targets of 1 nat, none dropped")
        check("training mode", model.training, equal=training, because="as it was before")
        check("gradient", model.lm_head.weight.grad is None, equal=True, because="no backward")
        check("weight", float(model.lm_head.weight.detach()), equal=1.0, because="no update")
        check("the next loss has a graph", torch.is_grad_enabled(), equal=True,
              because="gradients are on again")  # fmt: skip
