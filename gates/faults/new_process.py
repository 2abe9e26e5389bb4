"""Wrong roles that one process cannot tell from right ones: Python's hash, set order, the number
of the process. The hash of a text is another one in each process (PYTHONHASHSEED).
"""

from __future__ import annotations

import copy
import os
import random

import torch

from gates.faults.manifest import rewritten
from gates.faults.stored_ids import bpe_changed
from harness import fault
from reference.data.near_duplicates import Deduplication

SAME = "m1_new_process::test_same_results"
PREPARED = "m0_manifest::test_same_bytes[new-process]"


def process_number(text):
    """A number below 2^31 from a text, that another process does not give."""
    return hash(text) % 2**31


@fault(role="split", caught_by=SAME, seen_in="own")
def uses_the_process_hash(reference):
    """A cluster's split is Python's hash of seed and name: another process holds out others."""

    def split(clusters, fraction, seed):
        limit = fraction * 2**31
        numbers = [process_number(b"%d " % seed + cluster) for cluster in clusters]
        return ["validation" if number < limit else "train" for number in numbers]

    return split


@fault(role="split", caught_by=SAME, seen_in="own")
def mixes_in_the_process_id(reference):
    """The number of the process is part of the seed."""
    return lambda clusters, fraction, seed: reference.split(
        clusters, fraction, seed + 2**32 * os.getpid()
    )


@fault(role="shuffle", caught_by=SAME, seen_in="own")
def shuffles_by_the_process_hash(reference):
    """The generator's seed is Python's hash of seed and epoch as text."""

    def shuffle(num_rows, seed, epoch):
        order = list(range(num_rows))
        random.Random(process_number(f"{seed}/{epoch}")).shuffle(order)
        return torch.tensor(order)

    return shuffle


@fault(role="buffered_shuffle", caught_by=SAME, seen_in="own")
def draws_from_the_buffer_by_the_process_hash(reference):
    """The seed of the buffer is Python's hash of the run's seed as text."""
    return lambda num_rows, seed, epoch, buffer_rows: reference.buffered_shuffle(
        num_rows, process_number(f"{seed}"), epoch, buffer_rows
    )


@fault(role="interleave", caught_by=SAME, seen_in="own")
def seeds_sources_by_the_process_hash(reference):
    """The seed of each source is Python's hash of its name."""

    def interleave(targets, weights, seed, shuffle):
        return reference.interleave(
            targets,
            weights,
            seed,
            lambda n, own, epoch: shuffle(n, process_number(f"{own}"), epoch),
        )

    return interleave


@fault(role="loader", caught_by=SAME, seen_in="own")
def loads_in_an_order_of_the_process(reference):
    """The position is right, but the order that it counts in is another one in each process."""
    shuffled = shuffles_by_the_process_hash.build(reference)
    return lambda windows, settings, stack: reference.loader(
        windows, settings, stack.replace({"shuffle": shuffled})
    )


@fault(role="loader", caught_by=SAME, seen_in="own")
def names_windows_by_the_process_hash(reference):
    """A position names its windows by Python's hash, so that a new process refuses it."""

    def loader(windows, settings, stack):
        named = copy.copy(windows)
        named.sha256 = f"{process_number(windows.sha256):x}"
        return reference.loader(named, settings, stack)

    return loader


@fault(role="deduplicate", caught_by=SAME, seen_in="own")
def keeps_the_first_of_a_set(reference):
    """Of a cluster's texts the one stays that comes first in a set."""

    def deduplicate(documents, settings):
        clusters = reference.deduplicate(documents, settings).clusters
        members = {}
        for place, cluster in enumerate(clusters):
            members.setdefault(cluster, {}).setdefault(documents[place], place)
        kept = sorted(places[next(iter(set(places)))] for places in members.values())
        return Deduplication(kept, clusters)

    return deduplicate


@fault(role="train_bpe", caught_by=SAME, seen_in="own")
def numbers_bytes_in_set_order(reference):
    """The letters of the alphabet get their ids in the order of a set."""

    def change(content):
        vocabulary = content["model"]["vocab"]
        letters = [token for token in vocabulary if len(token) == 1]
        ids = [vocabulary[letter] for letter in letters]
        vocabulary.update(zip(set(letters), ids, strict=True))

    return bpe_changed(reference, change)


@fault(role="build_model", caught_by=SAME, seen_in="own")
def seeds_parameters_by_the_process_hash(reference):
    """Each matrix is drawn with a seed of its own: Python's hash of the run's and its name."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                own = torch.Generator().manual_seed(
                    process_number(f"{torch.initial_seed()} {name}")
                )
                torch.nn.init.normal_(parameter, std=config.initializer_std, generator=own)
        return model

    return build_model


@fault(role="prepare", caught_by=PREPARED, seen_in="own")
def writes_documents_in_set_order(reference):
    """The documents of each shard stand in the order of Python's hashes of their texts."""
    return rewritten(
        reference, lambda documents: sorted(documents, key=lambda document: hash(document.text))
    )
