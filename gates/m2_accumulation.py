"""M2. The gradient of a window is the gradient of its token mean, however it is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from gates import toys
from harness import gate
from harness.compare import relative_error, worst_relative
from reference.window import Window

# Rows with all, few and no targets: equal counts would hide a wrong denominator.
COUNTS = (16, 1, 0, 3, 16, 0, 2, 7)
SOURCE = "the objective: sum of nll over all targets of the window / their number"
SUMMATION = "the same sums in another order; a wrong denominator is off by tens of percent"


@gate(
    claim="k microbatches leave the gradient of the window's token mean, and its norm",
    roles=["accumulate"],
    not_claimed="low precision, several ranks, speed",
    source=SOURCE,
)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_partition(stack, k, rng, device, check):
    model = toys.tiny_model(stack, device)
    window = toys.ragged_window(rng, COUNTS)
    loss, want = toys.token_mean(model, window)
    stats = stack.accumulate(model, window.split(k).to(device), None)
    got = toys.gradients(model)
    bound = toys.rounding(toys.working_dtype(stack))

    check("targets", stats.num_targets, equal=sum(COUNTS), because="the labels that are not -100")
    check("tokens", stats.num_tokens, equal=8 * 16, because="every position that was read")
    check(
        "relative error of the loss sum",
        abs(stats.nll_sum / sum(COUNTS) / loss - 1),
        at_most=min(max(bound, 1e-6), 1e-5),
        because="a sum that may be kept in float32 (eps 1.2e-7) but not narrower (bfloat16 4e-3)",
    )
    check("relative gradient error", worst_relative(got, want), at_most=bound, because=SUMMATION)
    check(
        "gradient norm / that of the token mean",
        toys.flat(got).norm() / toys.flat(want).norm(),
        within=(1 - bound, 1 + bound),
        because="Adam hides a scale; the norm, on which the clip acts, does not",
    )


@gate(
    claim="any cut of any rows into consecutive microbatches leaves the token mean's gradient",
    roles=["accumulate"],
    not_claimed="cuts inside a row",
    source=SOURCE,
)
def test_any_partition(stack, rng, device, check, for_all):
    model = toys.tiny_model(stack, device, num_layers=1)
    bound = toys.rounding(toys.working_dtype(stack))

    @for_all(
        counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
        cuts=st.sets(st.integers(1, 5)),
        max_examples=20,
    )
    def _(counts, cuts):
        whole = toys.ragged_window(rng, counts, num_tokens=6).microbatches[0]
        edges = [0, *sorted(cut for cut in cuts if cut < len(counts)), len(counts)]
        parts = [whole.rows(start, stop) for start, stop in pairwise(edges)]
        _, want = toys.token_mean(model, Window((whole,)))
        stack.accumulate(model, Window(tuple(parts)).to(device), None)
        check(
            "relative gradient error",
            relative_error(toys.flat(toys.gradients(model)), toys.flat(want)),
            at_most=bound,
            because=SUMMATION,
        )


@gate(
    claim="100 targets and 10 targets weigh 100 to 10, not 1 to 1",
    roles=["accumulate"],
    not_claimed="anything about more than two microbatches",
    source="huggingface/transformers PR#34191: mean of means, 125 % gradient error at 100 and 10",
)
def test_hundred_and_ten(stack, rng, device, check):
    model = toys.tiny_model(stack, device, num_layers=1)
    window = toys.ragged_window(rng, (100, 10), num_tokens=100)
    _, want = toys.token_mean(model, window)
    stack.accumulate(model, window.split(2).to(device), None)
    check(
        "relative gradient error",
        worst_relative(toys.gradients(model), want),
        at_most=toys.rounding(toys.working_dtype(stack)),
        because=SUMMATION,
    )


@gate(
    claim="microbatches with 3 and 1 targets and loss sums 6 and 4 have the mean 2.5, not 3",
    roles=["accumulate"],
    not_claimed="anything beyond these numbers",
    source="(6 + 4) / (3 + 1) = 2.5; the mean of the means 6/3 and 4/1 is 3",
)
def test_hand_example(stack, device, check):
    model = toys.LinearLoss([[2.0], [4.0]], start_D=[1.0]).to(device)
    window = toys.rows(toys.row([0, 0, 0, 1], num_targets=3), toys.row([1, 0, 0, 0], num_targets=1))
    stats = stack.accumulate(model, window.to(device), None)
    exact = "whole numbers, exact in float32"
    check("loss sum", stats.nll_sum, equal=10.0, because=exact, unit="nats")
    check("targets", stats.num_targets, equal=4, because=exact)
    check("gradient", toys.gradients(model)["lm_head.weight"], equal=2.5, because=exact)


@gate(
    claim="a window's gradient holds nothing of what was in the buffers before",
    roles=["accumulate"],
    not_claimed="memory that is read before the first backward for another purpose",
    source="paiml/entrenar PR#257: accumulation buffers from uninitialised memory",
)
def test_stale_gradients(stack, rng, device, check):
    model = toys.tiny_model(stack, device, num_layers=1)
    window = toys.ragged_window(rng, (5, 2, 0, 1), num_tokens=8)
    _, want = toys.token_mean(model, window)
    for times in ("over a stale gradient", "over the gradient of the window before"):
        if times == "over a stale gradient":
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e3)
        stack.accumulate(model, window.split(2).to(device), None)
        check(
            f"relative gradient error {times}",
            worst_relative(toys.gradients(model), want),
            at_most=toys.rounding(toys.working_dtype(stack)),
            because="the buffers start at zero; what was left in them is of the gradient's size",
        )


@gate(
    claim="all terms of the loss keep their ratio when the window is cut",
    roles=["accumulate", "token_nll"],
    not_claimed="which terms there are",
    source="OpenNMT/OpenNMT-py#2209: one term divided by the window's count, another by its own",
)
@pytest.mark.parametrize("k", [2, 8])
def test_ratio_of_terms(stack, k, rng, device, check):
    def with_a_second_term(hidden_MD, weight_VD, labels_M):
        nll_sum, num_tokens = stack.token_nll(hidden_MD, weight_VD, labels_M)
        logsumexp_M = (hidden_MD @ weight_VD.T).logsumexp(-1)
        return nll_sum + 0.1 * logsumexp_M[labels_M != -100].square().sum(), num_tokens

    window = toys.ragged_window(rng, COUNTS)
    model = toys.tiny_model(stack.replace({"token_nll": with_a_second_term}), device, num_layers=1)
    stack.accumulate(model, window.to(device), None)
    whole = toys.gradients(model)
    stack.accumulate(model, window.split(k).to(device), None)
    check(
        "relative gradient error against one microbatch",
        worst_relative(toys.gradients(model), whole),
        at_most=toys.rounding(toys.working_dtype(stack)),
        because="both terms are sums over targets, divided once by the window's count",
    )


@gate(
    claim="a window without targets leaves no gradient and nothing that is not finite",
    roles=["accumulate"],
    not_claimed="what the update does with it (m2_windows)",
    source="pytorch/pytorch#70348: a mean over no target is NaN",
)
def test_no_targets(stack, rng, device, check):
    model = toys.tiny_model(stack, device, num_layers=1)
    window = toys.ragged_window(rng, (3, 2), num_tokens=8)
    stack.accumulate(model, window.to(device), None)
    stats = stack.accumulate(model, window.trim(0).split(2).to(device), None)
    because = "nothing was asked, so nothing was lost"
    check("targets", stats.num_targets, equal=0, because=because)
    check("loss sum", stats.nll_sum, equal=0.0, because=because, unit="nats")
    check(
        "largest gradient",
        toys.flat(toys.gradients(model)).abs().max(),
        equal=0.0,
        because="the gradient of an empty sum; also what the window before left is gone",
    )
