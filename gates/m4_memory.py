"""M4. Operators and memory: any layout that autograd hands over, poisoned scratch, guard bands."""

from __future__ import annotations

import pytest
import torch

from gates import operators
from gates.memory import LAYOUTS, framed, guarded_allocations
from gates.operator_cases import EXAMPLES, ODD_EXAMPLES, attention_case
from harness import gate

ROLES = list(EXAMPLES)
# One row for all is for what flows: a parameter has no stride of 0. One value for all is for
# cotangents: equal keys have no gradient to compare, and the plain norm of equal values is exact.


def layout_pairs(role):
    """(layout of the inputs, layout of the cotangents): all for a norm, else each beside plain."""
    if role in ("rms_norm", "add_rms_norm"):
        return [(inputs, dy) for inputs in LAYOUTS for dy in LAYOUTS]
    pairs = [(name, name) for name in LAYOUTS]
    return pairs + [("offset", name) for name in LAYOUTS] + [(name, "offset") for name in LAYOUTS]


def laid_out(inputs, cotangents):
    """A layout for operators.trial."""

    def layout(name, x):
        if name == "cotangent":
            return LAYOUTS[cotangents](x)
        parameter = "weight" in name or "bias" in name
        dense = inputs == "one-value" or (inputs == "one-row" and parameter)
        return framed(x) if dense else LAYOUTS[inputs](x)

    return layout


def guarded_trial(stack, case, dtype, device, rng, check, *layout, at=""):
    """operators.trial, whose allocations lie between bands that must stay; returns the guards."""
    with guarded_allocations() as guards:
        operators.trial(stack, case, dtype, device, rng, check, *layout, at=at)
    check(f"{operators.short(dtype)}: elements of guard bands that were written",
          guards.changed(), equal=0,
          because="they belong to others" + (at and f"; {at}"))  # fmt: skip
    return guards


@gate(
    claim="the values and gradients are right for every layout of inputs and cotangents that "
    "autograd hands over: transposed, sliced, with padded rows, with an offset, and with stride 0 "
    "as broadcasting and .sum() make it; none of them is written to, nor what lies around results",
    roles=ROLES,
    not_claimed="how fast such layouts are",
    source="unslothai/unsloth PR#10617, flagos-ai/FlagGems PR#1084 (strides of dy), "
    "linkedin/Liger-Kernel#370 (dx written into dy), pytorch/pytorch#191937 (expanded keys), "
    "Dao-AILab/quack#88 (dx written at the row stride of dy)",
)
@pytest.mark.parametrize("role", ROLES)
def test_layouts(stack, role, rng, device, check):
    few = operators.dtypes(stack)[:: max(1, len(operators.dtypes(stack)) - 1)]  # the two ends
    for dtype in few:
        for inputs, cotangents in layout_pairs(role):
            layout = laid_out(inputs, cotangents)
            at = f"inputs {inputs}, cotangents {cotangents}"
            case = EXAMPLES[role](rng)
            guarded_trial(stack, case, dtype, device, rng, check, layout, at=at)


@gate(
    claim="keys and values of several heads that are one, by a stride of 0, are read as they are, "
    "with documents and without, for one token more than blocks of 32",
    roles=["attention"],
    not_claimed="how fast that is",
    source="pytorch/pytorch#191937: expanded keys and 32 k + 1 of them, where there is a mask",
)
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one-document"])
def test_expanded_heads(stack, documents, rng, device, check):
    def layout(name, x):
        return framed(x[:, :, :1]).expand(x.shape) if name in ("k", "v") else framed(x)

    for dtype in operators.dtypes(stack):
        for num_tokens in (33, 65):
            ids = (torch.arange(num_tokens) // 20).repeat(2, 1) if documents else None
            case = attention_case(rng, ids, (2, num_tokens, 6, 2, 64))
            at = f"{num_tokens} tokens"
            operators.trial(stack, case, dtype, device, rng, check, layout, at=at)


@gate(
    claim="outputs and scratch memory that hold NaN before, and bands of a pattern around them, "
    "change no result and are not written to; nothing is read around the inputs",
    roles=ROLES,
    not_claimed="memory that torch's own operators allocate inside themselves",
    source="tile-ai/tilelang PR#2461 (rows of scratch that were never written), "
    "Dao-AILab/quack#88 (dx written out of bounds), tile-ai/tilelang#290 (a bound check removed)",
)
@pytest.mark.parametrize("role", ROLES)
def test_guards(stack, role, rng, device, check):
    fresh = torch.empty(1009, device=device)
    check("elements of fresh memory that are not NaN", int((~fresh.isnan()).sum()), equal=0,
          because="deterministic algorithms fill what torch.empty returns")  # fmt: skip
    writes_itself = hasattr(getattr(stack, role), "kernel_calls")
    for dtype in operators.dtypes(stack):
        for case in (EXAMPLES[role](rng), ODD_EXAMPLES[role](rng)):
            guards = guarded_trial(stack, case, dtype, device, rng, check)
            if writes_itself:
                least = 1 if role == "gated_linear" else 2  # whose gradients take what it saved
                check("guarded allocations of a kernel", len(guards.storages), at_least=least,
                      because="an output and a gradient")  # fmt: skip
