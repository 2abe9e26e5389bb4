"""M1. The order of windows: every one once an epoch, sources by their shares, by place alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st

from gates.toy_windows import TARGETS, TOKENS
from harness import gate

ACCIDENT = "30 rows have 2.7e32 orders: an equal one is no accident"


@gate(
    claim="a shuffle buffer gives every row once, none earlier than the buffer allows, and another "
    "order in each epoch and seed",
    roles=["buffered_shuffle"],
    not_claimed="that it mixes as well as a shuffle of the whole; a new process (m1_new_process)",
    source="huggingface/datasets PR#8408, #7901: what the buffer holds is lost; "
    "huggingface/trl PR#6351: the epoch is not folded into the seed",
)
def test_buffered_shuffle(stack, check, for_all):
    @for_all(
        num_rows=st.integers(0, 99),
        buffer_rows=st.integers(1, 120),
        seed=st.integers(0, 2**32),
        epoch=st.integers(0, 50),
        max_examples=60,
    )
    def _(num_rows, buffer_rows, seed, epoch):
        order = stack.buffered_shuffle(num_rows, seed, epoch, buffer_rows).tolist()
        wrong = Counter(order)
        wrong.subtract(range(num_rows))
        off = sum(map(abs, wrong.values()))
        check("rows missing or repeated", off, equal=0, because="every row once an epoch")
        early = max((row - place for place, row in enumerate(order)), default=0)
        because = "a buffer of n rows has read n rows beyond those that left it"
        check("rows that leave too early", early >= buffer_rows, equal=False, because=because)
        again = stack.buffered_shuffle(num_rows, seed, epoch, buffer_rows).tolist()
        check("the same again", again == order, equal=True, because="a seed is one order")
        if min(num_rows, buffer_rows) < 30:
            return
        for name, other_seed, other_epoch in (
            ("the next epoch", seed, epoch + 1),
            ("the next seed", seed + 1, epoch),
            ("the next seed in the epoch before", seed + 1, max(epoch - 1, 0)),
        ):
            other = stack.buffered_shuffle(num_rows, other_seed, other_epoch, buffer_rows).tolist()
            check(f"{name} has this order", other == order, equal=False, because=ACCIDENT)


def consumed_beyond_share(rows, targets, weights):
    """The most that a source got beyond, or short of, its share of the targets, at any place."""
    consumed = torch.zeros(len(targets), dtype=torch.float64)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    worst = 0.0
    for source, _, row in rows:
        consumed[source] += targets[source][row]
        worst = max(worst, float((consumed - shares * consumed.sum()).abs().max()))
    return worst


def wrong_epochs(rows, targets):
    """Rows of any source's finished epochs that are missing in it or come twice."""
    wrong = 0
    for source, counts in enumerate(targets):
        teaching = {row for row, count in enumerate(counts) if count}
        own = [row for s, _, row in rows if s == source and row in teaching]
        for begin in range(0, len(own) - len(teaching) + 1, len(teaching)):
            wrong += len(teaching) - len(set(own[begin : begin + len(teaching)]))
    return wrong


SOURCE = st.lists(st.integers(0, TOKENS), min_size=1, max_size=30).filter(any)


@gate(
    claim="sources get their declared shares of the supervised tokens, at every place to within "
    "a row a source, and each goes through all of its rows before it repeats one",
    roles=["interleave"],
    not_claimed="that the shares are good ones",
    source="the mixture is declared in supervised tokens: rows, documents and bytes differ from "
    "source to source",
)
@pytest.mark.parametrize("weights", ["declared", "of the targets"])
def test_shares(stack, weights, check, for_all):
    @for_all(
        targets=st.lists(SOURCE, min_size=1, max_size=4),
        weights_drawn=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=4, max_size=4),
        seed=st.integers(0, 99),
        max_examples=30,
    )
    def _(targets, weights_drawn, seed):
        own = weights_drawn[: len(targets)] if weights == "declared" else None
        tensors = [torch.tensor(counts) for counts in targets]
        order = stack.interleave(tensors, own, seed, stack.shuffle)
        rows = order.rows(0, 200).tolist()
        beyond = consumed_beyond_share(rows, targets, own or [sum(counts) for counts in targets])
        bound = len(targets) * TOKENS
        because = "the longest row of each source: the source furthest behind its share is next"
        check("targets beyond a share", beyond, at_most=bound + 1e-6, because=because)
        check("rows missing in an epoch", wrong_epochs(rows, targets), equal=0, because="exact")
        counted = sum(targets[source][row] for source, _, row in rows)
        check("num_targets off", order.num_targets(0, 200) - counted, equal=0, because="exact")


@gate(
    claim="without weights all sources end an epoch together, and no epoch or source has another's "
    "order",
    roles=["interleave", "shuffle"],
    not_claimed="anything about declared weights (test_shares)",
    source="huggingface/trl PR#6351: the epoch is not folded into the seed on one of several paths",
)
def test_epochs(stack, check):
    targets = [torch.full((30,), TOKENS), torch.full((30,), TOKENS), torch.full((7,), TOKENS)]
    order = stack.interleave(targets, None, 1, stack.shuffle)
    per_epoch = sum(map(len, targets))
    rows = order.rows(0, 3 * per_epoch).tolist()
    epochs = [rows[begin : begin + per_epoch] for begin in range(0, 3 * per_epoch, per_epoch)]
    for epoch, part in enumerate(epochs):
        distinct = len({(source, row) for source, _, row in part})
        check("rows repeated in an epoch", per_epoch - distinct, equal=0, because="each once")
        mixed = sum(said != epoch for _, said, _ in part)
        check("rows of another epoch", mixed, equal=0, because="shares are the sources' own sizes")
    own = [[row for s, _, row in part if s == source] for part in epochs for source in (0, 1)]
    repeated = len(own) - len(set(map(tuple, own)))
    check("orders that are another's", repeated, equal=0, because=ACCIDENT)


@gate(
    claim="what stands at a place depends on the seed and the place alone, not on what was asked",
    roles=["interleave"],
    not_claimed="speed; a new process (m1_new_process)",
    source="the position of a run is one integer: huggingface/datasets#8308, PR#8295",
)
def test_places(stack, check, for_all):
    @for_all(start=st.integers(0, 300), length=st.integers(0, 60), max_examples=30)
    def _(start, length):
        def order():
            return stack.interleave(list(map(torch.tensor, TARGETS)), [1.0, 0.3], 2, stack.shuffle)

        whole = order().rows(0, start + length + 5).tolist()
        check("rows", len(whole), equal=start + length + 5, because="the sequence is endless")
        asked = order()
        for begin, stop in ((start, start + length), (0, 5), (start, start + length)):
            same = asked.rows(begin, stop).tolist() == whole[begin:stop]
            check("the same rows", same, equal=True, because="a pure function")
