"""M1. What a seed decides is the same in a new process, in which texts have other hashes."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import torch

from gates import fresh_process, probes, toy_windows
from gates.sample_texts import TRAINING
from gates.texts import changed_end, joined, words
from gates.toy_windows import TARGETS, ToyWindows, numbers_of
from harness import gate
from reference.data.near_duplicates import DuplicateSettings

NUM_CLUSTERS = 200
NUM_ROWS = 60
NUM_FAMILIES, FAMILY = 30, 3
SAVED = 7  # updates before a pass goes on in another process


def split(stack, seed):
    clusters = [hashlib.sha256(b"cluster %d" % number).digest() for number in range(NUM_CLUSTERS)]
    return stack.split(clusters, 0.5, seed)


def shuffle(stack, seed):
    return [row for epoch in (0, 1) for row in stack.shuffle(NUM_ROWS, seed, epoch).tolist()]


def buffered_shuffle(stack, seed):
    orders = [stack.buffered_shuffle(NUM_ROWS, seed, epoch, 20) for epoch in (0, 1)]
    return [row for order in orders for row in order.tolist()]


def interleave(stack, seed):
    targets = list(map(torch.tensor, TARGETS))
    orders = [stack.interleave(targets, w, seed, stack.shuffle) for w in (None, [1.0, 0.3])]
    return [row for order in orders for row in order.rows(0, 3 * NUM_ROWS).tolist()]


def deduplicate(stack, seed):
    """Families of near duplicates, some of them near the threshold, and two copies of the first."""
    drawn = random.Random(seed)
    documents = []
    for number in range(NUM_FAMILIES):
        first = words(drawn, 100)
        similarity = 0.95 if number % 2 else 0.8
        near = [changed_end(first, drawn, similarity) for _ in range(FAMILY - 1)]
        documents += map(joined, (first, *near))
    documents += documents[:2]
    found = stack.deduplicate(documents, DuplicateSettings())
    stays = [place in set(found.kept) for place in range(len(documents))]
    return list(zip(stays, found.clusters, strict=True))


def train_bpe(stack, seed):
    return list(stack.train_bpe(iter(TRAINING), 350))


def build_model(stack, seed):
    """The bytes of each parameter, hashed."""
    torch.manual_seed(seed)
    model = stack.build_model(probes.FAMILIES["decoder"], stack)
    return [
        (name, hashlib.sha256(parameter.detach().view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, parameter in model.named_parameters()
    ]


MADE = (split, shuffle, buffered_shuffle, interleave, deduplicate, train_bpe, build_model)


def made(stack, seed):
    """{role: what it gives, as a list}."""
    return {make.__name__: list(make(stack, seed)) for make in MADE}


def loader_of(stack, seed):
    return stack.loader(ToyWindows(TARGETS), toy_windows.settings(seed=seed), stack)


def gone_on(stack, seed, state):
    """The windows of each update behind the position; the words in which it is refused, if so."""
    loader = loader_of(stack, seed)
    try:
        loader.load_state_dict(json.loads(state))
    except ValueError as error:
        return [f"refused: {error}"]
    return list(map(numbers_of, loader))


def in_new_process(stack, seed, state):
    """What a new process gives for the same arguments."""
    return {**made(stack, seed), "loader": gone_on(stack, seed, state)}


@gate(
    claim="a new process, in which texts have other hashes and sets another order, gives the same "
    "split, orders of rows, duplicates, tokenizer and first parameters, and goes on from a "
    "position of the loader",
    roles=[*(make.__name__ for make in MADE), "loader"],
    not_claimed="other machines, other versions of the libraries; prepare (m0_manifest), whole "
    "runs (m2_resume)",
    source="Python: PYTHONHASHSEED; own: a split by hash() holds out others in every run, and a "
    "second call in the same process does not show it",
)
def test_same_results(stack, recipe, rng, check):
    seed = rng.initial_seed() % 2**31
    loader = loader_of(stack, seed)
    whole = list(map(numbers_of, loader))
    list(itertools.islice(loader, SAVED))
    state = json.dumps(loader.state_dict())
    here = {**made(stack, seed), "loader": whole[SAVED:]}
    there = fresh_process.call(recipe, in_new_process, "cpu", seed, state)
    check("roles called there", sorted(there), equal=sorted(here), because="all of them")
    for role, wanted in here.items():
        check(f"{role}: results", len(wanted), at_least=1, because="nothing is equal to nothing")
        pairs = itertools.zip_longest(wanted, there[role])
        differing = sum(one != other for one, other in pairs)
        check(f"{role}: results that differ in a new process", differing, equal=0,
              because="the arguments and the seed decide, not the process")  # fmt: skip
