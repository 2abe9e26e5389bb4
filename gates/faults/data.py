"""Wrong and right ways to order rows and to make windows of them."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from harness import benign, fault
from reference.window import Microbatch, Window

WINDOWS = "m1_packing::test_every_row_once"
SHUFFLE = "m1_packing::test_shuffle"


def batches_in(reference, new_order):
    """The reference's `batches` of `new_order(order, rows of a microbatch, of a window)`."""

    def batches(rows, order, make_labels, policy, rows_per_microbatch, microbatches_per_window):
        per_window = rows_per_microbatch * microbatches_per_window
        return reference.batches(
            rows,
            new_order(order, rows_per_microbatch, per_window),
            make_labels,
            policy,
            rows_per_microbatch,
            microbatches_per_window,
        )

    return batches


def whole_multiples(order, size):
    """The order without what does not fill `size` rows; one such part at least."""
    return order[: max(len(order) // size, 1) * size]


@fault(role="batches", caught_by=WINDOWS, seen_in="ml-explore/mlx-lm PR#1413, PR#1544")
def drops_the_last_partial_window(reference):
    """A last window with fewer rows is never trained on."""
    return batches_in(reference, lambda order, _, window: whole_multiples(order, window))


@fault(role="batches", caught_by=WINDOWS, seen_in="own")
def drops_the_last_partial_microbatch(reference):
    """A last microbatch with fewer rows is left out, as a loader's drop_last does."""
    return batches_in(reference, lambda order, microbatch, _: whole_multiples(order, microbatch))


@fault(
    role="batches",
    caught_by=[WINDOWS, "m1_labels::test_chain"],
    seen_in="huggingface/datasets#3423, #5360, lance-format/lance#2713",
)
def every_worker_reads_everything(reference):
    """Two workers read the whole order each, so each row comes twice."""
    return batches_in(reference, lambda order, *_: order.repeat_interleave(2))


@fault(
    role="batches",
    caught_by=[WINDOWS, "m1_labels::test_chain"],
    seen_in="metagene-ai/metagene-pretrain PR#18",
)
def fills_up_with_rows_of_the_next(reference):
    """A window takes a row of the next to look ahead, and the next reads it again."""

    def with_look_ahead(order, _, window):
        parts = list(order.split(window))
        return torch.cat([*(torch.cat([a, b[:1]]) for a, b in pairwise(parts)), parts[-1]])

    return batches_in(reference, with_look_ahead)


@fault(role="batches", caught_by=WINDOWS, seen_in="own")
def ignores_the_order(reference):
    """Rows come as they are stored, in every epoch alike."""
    return batches_in(reference, lambda order, *_: order.sort().values)


@fault(
    role="batches",
    caught_by=[WINDOWS, "m1_labels::test_chain"],
    seen_in="huggingface/transformers PR#37830, PR#46895, PR#46898, PR#47200",
)
def shifts_inputs_right_too(reference):
    """Inputs are shifted right and labels left: the token after the next is predicted."""

    def batches(*arguments):
        for window in reference.batches(*arguments):
            parts = []
            for part in window.microbatches:
                before = part.input_ids.roll(1, 1)
                before[:, 0] = 0
                parts.append(Microbatch(before, part.labels, part.positions, part.documents))
            yield Window(tuple(parts))

    return batches


@fault(role="batches", caught_by=[WINDOWS, "m1_labels::test_chain"], seen_in="own")
def labels_from_the_inputs_alone(reference):
    """Labels are made from T tokens, not T + 1: the last input of every row has no target."""

    def batches(rows, order, make_labels, *rest):
        def make_labels_of_inputs(tokens, documents, policy):
            labels = make_labels(tokens[:, :-1], documents[:, :-1], policy)
            return torch.cat([labels, labels.new_full((len(labels), 1), -100)], dim=1)

        return reference.batches(rows, order, make_labels_of_inputs, *rest)

    return batches


@fault(role="shuffle", caught_by=SHUFFLE, seen_in="huggingface/trl PR#6351, lancedb/lancedb#3705")
def forgets_the_epoch(reference):
    """The epoch is not part of the seed: every epoch has the same order."""
    return lambda num_rows, seed, epoch: reference.shuffle(num_rows, seed, 0)


@fault(role="shuffle", caught_by=SHUFFLE, seen_in="own")
def adds_the_epoch_to_the_seed(reference):
    """Seed 1 in epoch 0 has the order of seed 0 in epoch 1: different runs share epochs."""
    return lambda num_rows, seed, epoch: reference.shuffle(num_rows, seed + epoch, 0)


@fault(role="shuffle", caught_by=SHUFFLE, seen_in="own")
def draws_with_replacement(reference):
    """Rows are drawn with replacement: a third of them never in an epoch."""

    def shuffle(num_rows, seed, epoch):
        order = reference.shuffle(num_rows, seed, epoch)
        return order[torch.randint(num_rows, (num_rows,), generator=torch.Generator())]

    return shuffle


@fault(role="shuffle", caught_by=SHUFFLE, seen_in="own")
def draws_from_the_global_generator(reference):
    """The order comes from the process's generator, so nobody can draw it again."""
    return lambda num_rows, seed, epoch: torch.randperm(num_rows)


@benign(
    role="batches",
    accepted_by=[WINDOWS, "m1_labels::test_chain"],
    because="labels can be made for all rows at once, before they are ordered",
)
def labels_made_beforehand(reference):
    """Makes the labels of all rows once and picks from them."""

    def batches(rows, order, make_labels, policy, rows_per_microbatch, microbatches_per_window):
        labels = make_labels(rows.tokens, rows.documents, policy)[:, :-1]
        parts = [
            Microbatch(
                rows.tokens[chosen, :-1],
                labels[chosen],
                rows.positions[chosen, :-1],
                rows.documents[chosen, :-1],
            )
            for chosen in order.split(rows_per_microbatch)
        ]
        while parts:
            yield Window(tuple(parts[:microbatches_per_window]))
            del parts[:microbatches_per_window]

    return batches


@benign(
    role="shuffle",
    accepted_by=[SHUFFLE, "m1_new_process::test_same_results"],
    because="any permutation that seed and epoch alone decide will do",
)
def another_generator(reference):
    """Shuffles with Python's generator, seeded from the text of seed and epoch."""

    def shuffle(num_rows, seed, epoch):
        order = list(range(num_rows))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        return torch.tensor(order)

    return shuffle
