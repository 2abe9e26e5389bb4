"""M4. Attention in every dtype: values and gradients, documents, large scores, short rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gates import ladder, operators, probes, recorded
from gates.operator_cases import attention_case
from gates.operators import short
from harness import gate

TOKENS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 129)
# On a CPU each pair of heads and width costs a candidate half a minute of compiling.
CPU_WIDTHS = {(7, 1): (16,), (6, 2): (64,), (3, 3): (16,)}
WIDTHS = (16, 64, 96, 128)
# Cuts of two rows of 70 tokens: whole and at tile edges; beside them; many; one token each.
CUTS = {
    "tile-edges": [[64, 6], [16, 32, 22]],
    "beside-edges": [[63, 7], [17, 31, 1, 21]],
    "many": [[1, 2, 3] * 10 + [10], [70]],
    "one-token": [[1] * 70, [1] * 70],
}


def documents_of(name):
    """documents [2, 70] whose ids are in no order."""
    cuts = CUTS[name]
    names = [[(37 * i + 50) % 101 for i in range(len(row))] for row in cuts]
    return probes.documents_of(cuts, names)


def ratios_of(dtype, largest):
    """Factors of the error ratios where softmax is all but one-hot: 2 by RMS, `largest` by maximum.

    A fused backward takes delta = rowsum(o do) of the o it saved, in 16 bits (Dao et al. 2022,
    algorithm 4). Where one weight is all but one, p (do.v - delta) is a difference of equals: o's
    rounding makes dq and dk up to 2.3 times as far off, by RMS, as the plain formula's exact delta
    does. Without that a kernel would save a second o, or multiply twice more.
    """
    return {} if dtype == torch.float32 else dict.fromkeys(("dq", "dk"), (2.0, largest))


@gate(
    claim="values and gradients are as near to the oracle as the plain formula, for rows around "
    "every tile edge, head widths 16 to 128, and 7, 3 or 1 query heads to a key/value head",
    roles=["attention"],
    not_claimed="memory layouts (m4_memory), speed",
    source="Dao-AILab/flash-attention#2623 (right forward, gradients 200 times too large for one "
    "head width), XunhaoLai/native-sparse-attention-triton#27 (grouped heads)",
)
@pytest.mark.parametrize("heads", [(7, 1), (6, 2), (3, 3)], ids=["7/1", "6/2", "3/3"])
def test_shapes(stack, heads, rng, device, check):
    for dtype in operators.dtypes(stack):
        for width in CPU_WIDTHS[heads] if device.type == "cpu" else WIDTHS:
            for tokens in TOKENS if width == 64 and heads == (6, 2) else (38, 129):
                case = attention_case(rng, None, (2, tokens, *heads, width))
                if tokens < 15:  # a first token has no dq, and would drown the others in noise
                    case = replace(case, row_exponent=0)
                at = f"[2, {tokens}, {heads}, {width}]"
                # A row of one key has no gradient of q and k: test_short_rows has its bound.
                trial = operators.trial if tokens > 1 else values_alone
                trial(stack, case, dtype, device, rng, check, at=at)


def values_alone(stack, case, dtype, device, rng, check, at):
    """The forward trial of a row of one token: o = v."""
    tensors = {n: x.to(device, dtype) for n, x in case.tensors.items()}
    forward = operators.forward_of(case, stack.attention, tensors)
    plain, oracle = operators.references(
        case, dtype, tensors, operators.cotangents_of(case, forward, rng)[0]
    )
    operators.judge(check, f"{short(dtype)} o of one token", dtype, forward["o"],
                    plain.forward["o"], oracle.forward["o"], at=at)  # fmt: skip


@gate(
    claim="the same for rows of documents of any lengths, cut at tile edges and beside them",
    roles=["attention"],
    not_claimed="documents whose tokens are not contiguous",
    source="tile-ai/tilelang#1266 (a number of blocks that was built in), "
    "MinghuasLab/flash-attention-npu#44 (gradients of one segment in 1e18)",
)
@pytest.mark.parametrize("cuts", [name for name in CUTS if name != "one-token"])
def test_documents(stack, cuts, rng, device, check):
    documents_BT = documents_of(cuts)
    for dtype in operators.dtypes(stack):
        for width in (64,) if device.type == "cpu" else (64, 128):
            case = attention_case(rng, documents_BT, (2, 70, 6, 2, width))
            operators.trial(stack, case, dtype, device, rng, check, at=f"head width {width}")


@gate(
    claim="large scores: a softmax that is all but one-hot has values and gradients as near to the "
    "oracle as the plain formula",
    roles=["attention"],
    not_claimed="scores beyond the range of float16",
    source="NVIDIA/TransformerEngine#3216: dQ was wrong for real scores, right for Gaussian inputs",
)
@pytest.mark.parametrize("packed", [False, True], ids=["row", "packed"])
def test_large_scores(stack, packed, rng, device, check):
    for dtype in operators.dtypes(stack):
        documents_BT = documents_of("beside-edges") if packed else None
        case = attention_case(rng, documents_BT, (2, 70, 6, 2, 64), scale=30.0**0.5)
        # Scores of 100 in float32 are off by 100 units, and weights by as much of themselves.
        loose = 10.0
        if dtype != torch.float32:
            # Rows of one scale: else dk is the sum of a few rows, and its ratio luck (1.5 to 4.7 in
            # 160 draws; with one scale at most 3.0). float32 has rows of all scales.
            case = replace(case, row_exponent=0)
        ratios = ratios_of(dtype, largest=1.0)
        operators.trial(stack, case, dtype, device, rng, check, loose=loose, ratios=ratios)


@gate(
    claim="a token whose document is itself alone gives o = v, and its q and k have no gradient; "
    "so does the first token of any row",
    roles=["attention"],
    not_claimed="rows without any token",
    source="Dao-AILab/flash-attention#334, #443: NaN in dQ for one key",
)
@pytest.mark.parametrize("tokens", ["1", "3", "one-token"])
def test_short_rows(stack, tokens, rng, device, check):
    documents_BT = documents_of("one-token") if tokens == "one-token" else None
    T = 70 if tokens == "one-token" else int(tokens)
    alone = slice(None) if tokens == "one-token" else slice(0, 1)  # what sees itself alone
    for dtype in operators.dtypes(stack):
        case = attention_case(rng, documents_BT, (2, T, 6, 2, 64))
        tensors = {n: x.to(device, dtype).requires_grad_() for n, x in case.tensors.items()}
        o = operators.forward_of(case, stack.attention, tensors)["o"]
        v = tensors["v"].detach().repeat_interleave(3, dim=2)
        check(f"{short(dtype)}: elements of o that are not v's",
              (o.detach() != v)[:, alone].sum(), equal=0, because="a weight of one")  # fmt: skip
        dy = torch.zeros_like(o)
        dy[:, alone] = torch.randn(o[:, alone].shape, generator=rng).to(o)
        dq, dk, dv = torch.autograd.grad(o, list(tensors.values()), dy)
        # dq = (do.v - do.o) k: zero but for two orders of one sum.
        size = 64 * torch.finfo(torch.float32).eps
        for name, gradient in (("dq", dq), ("dk", dk)):
            check(f"{short(dtype)}: largest {name}", gradient.abs().max(),
                  at_most=size, because="do.v - do.o is zero but for the order of 64 terms of 1; "
                  "dividing by the other keys is NaN")  # fmt: skip
        want = dy.double().unflatten(2, (2, 3)).sum(3)
        error = (dv.double() - want).abs().max() / want.abs().max()
        check(f"{short(dtype)}: relative error of dv", error,
              at_most=2 * torch.finfo(dtype).eps, because="do of the group's heads")  # fmt: skip


@gate(
    claim="keys of 1e4 and values of 1e30 in later tokens and in other documents change no bit "
    "of a token's output or of its document's gradients; where nobody looks, dk and dv are zero",
    roles=["attention"],
    not_claimed="NaN in other documents: the plain formula multiplies it by zero",
    source="tile-ai/tilelang PR#2461 (0 * NaN in padded rows), pytorch/pytorch#41508",
)
@pytest.mark.parametrize("place", ["other-document", "later"])
def test_isolation(stack, place, rng, device, check):
    documents_BT = documents_of("beside-edges") if place == "other-document" else None
    first = slice(0, 17)  # in both rows part of the first document, or the earlier tokens
    for dtype in operators.dtypes(stack):
        case = attention_case(rng, documents_BT, (2, 70, 6, 2, 64))
        dy = torch.zeros(2, 70, 6, 64, dtype=torch.float64)
        dy[:, first] = operators.normal(rng, 2, 17, 6, 64)
        # Scores of 1e4 outweigh any finite mask; where a later query sees such a key, float32 still
        # knows its score to a thousandth.
        huge = min(1e30, torch.finfo(dtype).max / 2)
        results = []
        for value in (None, huge):
            tensors = {n: x.to(device, dtype) for n, x in case.tensors.items()}
            foreign = slice(63, None) if place == "other-document" else slice(17, None)
            if value is not None:
                tensors["k"][:, foreign], tensors["v"][:, foreign] = 1e4, -value
            tensors = {n: x.requires_grad_() for n, x in tensors.items()}
            o = operators.forward_of(case, stack.attention, tensors)["o"]
            gradients = torch.autograd.grad(o, list(tensors.values()), dy.to(o))
            results.append([o.detach()[:, first], *(g[:, first] for g in gradients)])
            unseen = [g[:, 17:].abs().max() for g in gradients]
            check(f"{short(dtype)}: largest gradient where nobody looks", torch.stack(unseen).max(),
                  equal=0.0, because="no output that counts depends on it")  # fmt: skip
        changed = sum(int((a != b).sum()) for a, b in zip(*results, strict=True))
        check(f"{short(dtype)}: elements that {huge:.0e} elsewhere changed", changed, equal=0,
              because="a weight of exactly zero")  # fmt: skip


@gate(
    claim="the same at the heads of the rung's model, and for real queries, keys and values",
    roles=["attention"],
    not_claimed="the rung's number of tokens",
    source="the presets of reference.config; NVIDIA/TransformerEngine#3216",
)
@pytest.mark.parametrize("inputs", ["rung", "recorded"])
def test_models(stack, inputs, rung, rng, device, check):
    def rung_case(config):
        heads = config.num_query_heads, config.num_kv_heads, config.head_width
        return attention_case(rng, documents_of("many"), (2, 70, *heads))

    def rung_cases():
        return [rung_case(config) for config in ladder.operator_configs(rung)]

    def ratios(dtype):
        # By maximum 1.8 to 4.5 in 90 draws of a fused backward in torch: one element decides.
        return ratios_of(dtype, largest=2.0)

    recorded.trials("attention", inputs, rung_cases, stack, rng, device, check, ratios)
