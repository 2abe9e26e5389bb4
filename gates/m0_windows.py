"""M0. The ledger's windows: updates, the last window, who reads which row, and the targets."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import strategies as st

from gates import toys
from harness import gate
from reference.loss import NO_TARGET

PLAN = (23_000_000_000, 4096, 8, 4, 8)
WINDOW = 1_048_576
NOT_CLAIMED = "that this window size trains best"
POLICIES = ("trim", "overshoot")
sizes = st.integers(1, 6)


@gate(
    claim="the plan's 23e9 tokens are 21,935 updates, and the last window is what was declared",
    roles=["plan_windows"],
    not_claimed=NOT_CLAIMED,
    source="4096 x 8 sequences x 8 ranks x 4 microbatches = 1,048,576 tokens a window",
)
@pytest.mark.parametrize("policy", POLICIES)
def test_plan(stack, check, policy):
    plan = stack.plan_windows(*PLAN, policy)
    exact = "an integer of the plan"
    check("window", plan.window_tokens, equal=WINDOW, because=exact)
    check("updates", plan.num_updates, equal=21_935, because=exact)
    check("left for the last window", plan.remainder_tokens, equal=534_016, because=exact)
    check("too many", plan.overshoot_tokens, equal=514_560, because=exact)
    full = plan.total_tokens + plan.overshoot_tokens
    check("if every window were full", full, equal=23_000_514_560, because=exact)
    trims = policy == "trim"
    check("last window", plan.last_window_tokens, equal=534_016 if trims else WINDOW,
          because="as declared")  # fmt: skip
    check("trained on", plan.planned_tokens, equal=PLAN[0] if trims else 23_000_514_560,
          because="as declared")  # fmt: skip


@gate(
    claim="the windows sum to the total, or to the declared overshoot, without a token lost",
    roles=["plan_windows"],
    not_claimed=NOT_CLAIMED,
    source="ml-explore/mlx-lm PR#1413: the partial window dropped; updates are the ceiling",
)
def test_any_sum(stack, check, for_all):
    @for_all(total=st.integers(1, 3000), cut=st.tuples(*[sizes] * 4),
             policy=st.sampled_from(POLICIES), max_examples=80)  # fmt: skip
    def _(total, cut, policy):
        plan = stack.plan_windows(total, *cut, policy)
        windows = list(plan.sizes())
        window = cut[0] * cut[1] * cut[2] * cut[3]
        full_windows = len(range(0, total, window))  # counted by walking, not by dividing
        check("updates", plan.num_updates, equal=full_windows, because="the ceiling")
        check("windows listed", len(windows), equal=full_windows, because="one an update")
        target = total if policy == "trim" else window * full_windows
        check("sum of windows", sum(windows), equal=target, because="as declared")
        check("planned", plan.planned_tokens, equal=target, because="as declared")
        check("smallest window", min(windows), at_least=1, because="no update without tokens")
        check("largest window", max(windows), at_most=window, because="the window size")
        check("all but the last", len({*windows[:-1], window}), equal=1, because="they are full")


@gate(
    claim="the plan is exact beyond 2^53 tokens and at an exact multiple of the window",
    roles=["plan_windows"],
    not_claimed=NOT_CLAIMED,
    source="integers: a float64 holds 53 bits; verl-project/verl#7401: an epoch boundary lost",
)
def test_edges(stack, check, for_all):
    @for_all(
        few=st.integers(1, 9),
        many=st.integers(2**52, 2**54),
        cut=st.tuples(st.integers(3, 9000), sizes, sizes, sizes),
        max_examples=30,
    )
    def _(few, many, cut):
        window = cut[0] * cut[1] * cut[2] * cut[3]
        for num_windows in (few, many):
            for beside, updates, last in (
                (-1, num_windows, window - 1),
                (0, num_windows, window),
                (1, num_windows + 1, 1),
            ):
                plan = stack.plan_windows(num_windows * window + beside, *cut, "trim")
                check("updates", plan.num_updates, equal=updates, because="the integer ceiling")
                check("last window", plan.last_window_tokens, equal=last, because="what is left")
                check("too many", plan.overshoot_tokens, equal=window - last,
                      because="to a full window")  # fmt: skip


@gate(
    claim="over all ranks and microbatches every row of a run is read once, and windows follow on",
    roles=["window_rows", "plan_windows"],
    not_claimed="that a loader keeps to it (that is measured where it runs)",
    source="huggingface/datasets#3423: rows replicated per rank; metagene-ai/metagene-pretrain "
    "PR#18: rows shared by neighbours; modelscope/ms-swift#10099: a cursor in the wrong unit",
)
def test_any_rows(stack, check, for_all):
    @for_all(total=st.integers(1, 1200), cut=st.tuples(*[sizes] * 4),
             policy=st.sampled_from(POLICIES), max_examples=60)  # fmt: skip
    def _(total, cut, policy):
        plan = stack.plan_windows(total, *cut, policy)
        done = 0
        for update in range(plan.num_updates):
            rows = rows_of_update(stack, plan, update)
            check("first row of an update", rows[:1], equal=[done], because="the next unread row")
            check("rows of an update, each once", rows, equal=list(range(done, done + len(rows))),
                  because="one rank and one microbatch each")  # fmt: skip
            done += len(rows)
        check("rows of the run", done, equal=-(-plan.planned_tokens // plan.context_tokens),
              because="all that the planned tokens fill")  # fmt: skip


@gate(
    claim="a training run makes the planned updates on the planned tokens",
    roles=["plan_windows", "train"],
    not_claimed=NOT_CLAIMED,
    source="verl-project/verl#7401: a run ended early with exit status 0",
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("total", [1, 11, 12, 13, 29])
def test_run_keeps_to_the_plan(stack, rng, device, check, total, policy):
    num_rows, T = 3, 4
    plan = stack.plan_windows(total, T, num_rows, 1, 1, policy)
    windows = [toys.ragged_window(rng, [T] * num_rows, T) for _ in range(4)]
    settings = toys.plain_descent(0.1)
    result = stack.train(toys.TINY, stack, windows, settings, 0, device, total, policy)
    check("updates", result.counters.optimizer_steps, equal=plan.num_updates, because="as planned")
    check("targets", result.counters.tokens_updated, equal=plan.planned_tokens,
          because="as planned")  # fmt: skip
    check("sizes", [record.num_targets for record in result.records], equal=list(plan.sizes()),
          because="as planned")  # fmt: skip


@gate(
    claim="the ledger's targets of a row are the labels that carry one, under both policies",
    roles=["count_targets", "make_labels"],
    not_claimed="which policy trains better",
    source="pytorch/torchtitan PR#4075: total - 1 where sum(length - 1) was meant",
)
@pytest.mark.parametrize("policy", ["inside", "across"])
def test_any_targets(stack, check, for_all, policy):
    @for_all(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), max_examples=60)
    def _(lengths):
        documents = itertools.chain.from_iterable([i] * n for i, n in enumerate(lengths))
        documents_BT = torch.tensor([list(documents)], dtype=torch.int32)
        input_ids_BT = torch.ones(documents_BT.shape, dtype=torch.int64)
        labels_BT = stack.make_labels(input_ids_BT, documents_BT, policy)
        check("targets", stack.count_targets(lengths, policy),
              equal=int((labels_BT != NO_TARGET).sum()), because="labels not -100")  # fmt: skip


def rows_of_update(stack, plan, update):
    """All rows that all ranks read in one update, sorted."""
    places = itertools.product(range(plan.num_ranks), range(plan.num_microbatches))
    return sorted(
        row
        for rank, microbatch in places
        for row in stack.window_rows(plan, update, rank, microbatch)
    )
