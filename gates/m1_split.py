"""M1. A split keeps clusters together, and depends on nothing but cluster, fraction and seed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import strategies as st

from harness import gate

SPLITS = ("train", "validation")


def named(number):
    """A cluster's name: 32 bytes."""
    return hashlib.sha256(b"cluster %d" % number).digest()


def split_of(stack, check, clusters, fraction, seed):
    """The split of each document, after it was seen that each has one."""
    found = list(stack.split(clusters, fraction, seed))
    check("documents", len(found), equal=len(clusters), because="each has a split")
    check("other words", len(set(found) - set(SPLITS)), equal=0, because="train or validation")
    return found


@gate(
    claim="the documents of a cluster are in one split",
    roles=["split"],
    not_claimed="that clusters hold all near duplicates (m1_duplicates)",
    source="openai/parameter-golf#2127: 80 % of the validation documents were trained on",
)
def test_together(stack, check, for_all):
    @for_all(
        numbers=st.lists(st.integers(0, 12), min_size=2, max_size=60),
        fraction=st.sampled_from([0.1, 0.5, 0.9]),
        seed=st.integers(0, 2**31),
        max_examples=60,
    )
    def _(numbers, fraction, seed):
        found = split_of(stack, check, list(map(named, numbers)), fraction, seed)
        torn = sum(len({s for n, s in zip(numbers, found, strict=True) if n == own}) > 1
                   for own in set(numbers))  # fmt: skip
        check("clusters in both splits", torn, equal=0, because="a near duplicate would leak")


@gate(
    claim="a cluster's split does not change with the order, with other documents, or when it is "
    "asked again",
    roles=["split"],
    not_claimed="a cluster whose smallest hash changes because a near duplicate was added; a new "
    "process (m1_new_process)",
    source="own: a corpus that grows must not move its held-out documents into the training set",
)
@pytest.mark.parametrize("change", ["order", "more", "fewer", "again"])
def test_stable(stack, change, check, for_all):
    @for_all(seed=st.integers(0, 2**31), num=st.integers(40, 90), max_examples=20)
    def _(seed, num):
        numbers = list(range(num))
        changed = {
            "order": numbers[::-1],
            "more": [*range(1000, 1050), *numbers],
            "fewer": numbers[10:],
            "again": numbers,
        }[change]
        before = split_of(stack, check, list(map(named, numbers)), 0.5, seed)
        after = split_of(stack, check, list(map(named, changed)), 0.5, seed)
        there = dict(zip(numbers, before, strict=True))
        moved = sum(there.get(n, s) != s for n, s in zip(changed, after, strict=True))
        check("clusters that moved", moved, equal=0, because="seed and name decide alone")


@gate(
    claim="the fraction is held out, by another seed others, and a larger one holds the smaller",
    roles=["split"],
    not_claimed="the fraction of tokens: clusters are counted",
    source="a hash below fraction * 2^64",
)
@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_fraction(stack, fraction, check):
    num = 100_000
    clusters = [named(number) for number in range(num)]
    found = split_of(stack, check, clusters, fraction, 7)
    share = found.count("validation") / num
    deviation = (fraction * (1 - fraction) / num) ** 0.5
    check(
        "share held out",
        share,
        within=(fraction - 5 * deviation, fraction + 5 * deviation),
        because="five deviations of independent draws",
    )
    other = split_of(stack, check, clusters, fraction, 8)
    both = sum(a == b == "validation" for a, b in zip(found, other, strict=True)) / num
    limit = fraction**2 + 5 * (fraction**2 / num) ** 0.5
    check("share held out by two seeds", both, at_most=limit, because="fraction^2, independent")
    more = split_of(stack, check, clusters, min(2 * fraction, 0.9), 7)
    lost = sum(a == "validation" != b for a, b in zip(found, more, strict=True))
    check("held out before, and not now", lost, equal=0, because="a larger part holds the smaller")
