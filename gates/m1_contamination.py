"""M1. Evaluation text that stands in the training text is found, and nothing else is."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st

from gates.texts import joined, words
from harness import gate
from reference.data.contamination import ContaminationSettings

NGRAM_WORDS = 13
SETTINGS = ContaminationSettings(ngram_words=NGRAM_WORDS)


def runs_of(text, num_words=NGRAM_WORDS):
    """The runs of words of a text, by Python's own sets; all words if there are fewer."""
    own = text.lower().split()
    return {tuple(own[i : i + num_words]) for i in range(max(len(own) - num_words + 1, 1))} - {()}


def compared(stack, check, train, evaluation):
    """What the role finds, after it was seen that every document has its number."""
    found = stack.contamination(iter(train), evaluation, SETTINGS)
    num = len(evaluation)
    check("overlaps", len(found.overlaps), equal=num, because="one an evaluation document")
    return found


@gate(
    claim="an evaluation document is shared exactly if its bytes are a training document's",
    roles=["contamination"],
    not_claimed="documents that are almost the same (test_overlap; m1_duplicates)",
    source="openai/parameter-golf#2127: 80 % of the validation set was in the training set",
)
def test_shared(stack, check, for_all):
    texts = [
        b"",
        b"a",
        b"A",
        b"a ",
        b"b",
        b"a b c",
        b"a b c d",
        b"x" * 500 + b"1",
        b"x" * 500 + b"2",
    ]

    @for_all(
        train=st.lists(st.sampled_from(texts), max_size=9),
        evaluation=st.lists(st.sampled_from(texts), min_size=1, max_size=9),
        max_examples=80,
    )
    def _(train, evaluation):
        found = compared(stack, check, train, evaluation)
        wanted = [i for i, text in enumerate(evaluation) if text in train]
        missed = len(set(wanted) - set(found.shared))
        check("shared documents missed", missed, equal=0, because="equal bytes")
        other = len(set(found.shared) - set(wanted))
        check("others called shared", other, equal=0, because="other bytes")


@gate(
    claim="an evaluation document's overlap is the share of its 13-grams that training text has",
    roles=["contamination"],
    not_claimed="paraphrases and translations",
    source="Brown et al. 2020, appendix C",
)
@pytest.mark.parametrize(
    "place", ["whole", "beginning", "middle", "end", "short", "spaced", "none"]
)
def test_overlap(stack, place, rng, check):
    drawn = random.Random(rng.initial_seed())
    long = [words(drawn, 120) for _ in range(6)]
    leaked = {
        "whole": long[0],
        "beginning": [*long[0][:60], *words(drawn, 40)],
        "middle": [*words(drawn, 50), *long[0][30:75], *words(drawn, 50)],
        "end": [*words(drawn, 70), *long[0][-30:]],
        "short": [*words(drawn, 20), *long[0][10:22], *words(drawn, 20)],  # 12 words: no 13-gram
        "spaced": long[0],
        "none": words(drawn, 100),
    }[place]
    text = joined(leaked)
    if place == "spaced":
        text = text.upper().replace(b" ", b"\n\t ")
    train = [joined(words(drawn, 200)) for _ in range(20)]
    train[drawn.randrange(20)] = text  # what is written in the training text
    evaluation = [joined(one) for one in long]
    found = compared(stack, check, train, evaluation)
    for number, (one, overlap) in enumerate(zip(evaluation, found.overlaps, strict=True)):
        wanted = len(runs_of(one) & runs_of(text)) / len(runs_of(one))
        name = "overlap - that of the planted text" if number == 0 else "overlap of the others"
        check(name, abs(overlap - wanted), at_most=1e-12, because="counted by Python's sets")


@gate(
    claim="every training document is compared, however many there are and wherever they stand",
    roles=["contamination"],
    not_claimed="how long it takes",
    source="own: a check of the first shard alone would pass",
)
@pytest.mark.parametrize("place", [0, 500, 999])
def test_all_documents(stack, place, rng, check):
    drawn = random.Random(rng.initial_seed())
    evaluation = [joined(words(drawn, 40)) for _ in range(50)]
    train = [joined(words(drawn, 30)) for _ in range(1000)]
    train[place] = evaluation[17]
    found = compared(stack, check, train, evaluation)
    check("shared documents", list(found.shared), equal=[17], because="the planted one")
    check("its overlap", found.overlaps[17], equal=1.0, because="all of it was planted")
    rest = sum(found.overlaps) - found.overlaps[17]
    check("overlap of the others", rest, equal=0.0, because="they share no run of words")
