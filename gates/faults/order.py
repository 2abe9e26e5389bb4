"""Wrong and right ways to put windows of several sources into order."""

from __future__ import annotations

import random

import torch

from harness import benign, fault

BUFFER = "m1_order::test_buffered_shuffle"
SHARES = "m1_order::test_shares"
DECLARED, NATURAL = f"{SHARES}[declared]", f"{SHARES}[of the targets]"
EPOCHS = "m1_order::test_epochs"
PLACES = "m1_order::test_places"


# --- buffered_shuffle ------------------------------------------------------------------------


@fault(role="buffered_shuffle", caught_by=BUFFER, seen_in="huggingface/datasets PR#8408, #7901")
def loses_what_the_buffer_holds(reference):
    """What is in the buffer at the epoch's end is not handed out."""

    def buffered_shuffle(num_rows, seed, epoch, buffer_rows):
        order = reference.buffered_shuffle(num_rows, seed, epoch, buffer_rows)
        return order[: max(num_rows - buffer_rows, 0)]

    return buffered_shuffle


@fault(role="buffered_shuffle", caught_by=BUFFER, seen_in="huggingface/datasets PR#8408, #7901")
def fills_the_buffer_again_midway(reference):
    """Half way the buffer is filled anew from the rows that follow: some come twice, some never."""

    def buffered_shuffle(num_rows, seed, epoch, buffer_rows):
        half = num_rows // 2
        first = reference.buffered_shuffle(num_rows, seed, epoch, buffer_rows)[:half]
        rest = reference.buffered_shuffle(num_rows - half, seed, epoch, buffer_rows)
        return torch.cat([first, rest + half])

    return buffered_shuffle


@fault(role="buffered_shuffle", caught_by=BUFFER, seen_in="huggingface/trl PR#6351")
def draws_from_the_buffer_alike_in_every_epoch(reference):
    """The epoch is not folded into the seed of the buffer, only into that of the whole shuffle."""
    return lambda n, seed, epoch, size: reference.buffered_shuffle(n, seed, 0, size)


@fault(role="buffered_shuffle", caught_by=BUFFER, seen_in="own")
def adds_the_epoch_to_the_buffers_seed(reference):
    """Seed 1 in epoch 0 is seed 0 in epoch 1."""
    return lambda n, seed, epoch, size: reference.buffered_shuffle(n, seed + epoch, 0, size)


@fault(role="buffered_shuffle", caught_by=BUFFER, seen_in="own")
def needs_the_whole_epoch_in_memory(reference):
    """The buffer's size is not heeded: a row of the end can come first."""
    return lambda n, seed, epoch, size: reference.shuffle(n, seed, epoch)


@benign(
    role="buffered_shuffle",
    accepted_by=[BUFFER, "m1_loader::test_once_an_epoch", "m1_loader::test_resumed"],
    because="no row leaves before the buffer has read it, and each once",
)
def block_by_block(reference):
    """Shuffles each run of buffer_rows rows by itself."""

    def buffered_shuffle(num_rows, seed, epoch, buffer_rows):
        rng = random.Random(f"{seed}/{epoch}")
        rows = list(range(num_rows))
        blocks = [rows[begin : begin + buffer_rows] for begin in range(0, num_rows, buffer_rows)]
        order = [row for block in blocks for row in rng.sample(block, len(block))]
        return torch.tensor(order, dtype=torch.int64)

    return buffered_shuffle


# --- interleave ------------------------------------------------------------------------------


class OneByOne:
    """Rows chosen one after the other by `next_source(consumed, shares, next targets)`."""

    def __init__(self, targets, weights, seed, shuffle, next_source):
        self.targets = [counts.tolist() for counts in targets]
        totals = [sum(counts) for counts in self.targets]
        weights = totals if weights is None else weights
        self.shares = [weight / sum(weights) for weight in weights]
        self.rows_per_epoch = sum(count > 0 for counts in self.targets for count in counts)
        self._seed, self._shuffle, self._next_source = seed, shuffle, next_source

    def order(self, source, epoch):
        """The source's rows in an epoch; those without a target are left out."""
        rows = [row for row, count in enumerate(self.targets[source]) if count]
        order = self._shuffle(len(rows), 1000 * self._seed + source, epoch)
        return [rows[place] for place in order.tolist()]

    def rows(self, start, stop):
        num_sources = len(self.targets)
        consumed, epochs = [0] * num_sources, [0] * num_sources
        left = [self.order(source, 0) for source in range(num_sources)]
        made = []
        while len(made) < stop:
            ahead = [self.targets[source][left[source][0]] for source in range(num_sources)]
            source = self._next_source(consumed, self.shares, ahead)
            row = left[source].pop(0)
            made.append((source, epochs[source], row))
            consumed[source] += self.targets[source][row]
            if not left[source]:
                epochs[source] += 1
                left[source] = self.order(source, epochs[source])
        return torch.tensor(made[start:], dtype=torch.int64).view(-1, 3)

    def num_targets(self, start, stop):
        return sum(self.targets[source][row] for source, _, row in self.rows(start, stop).tolist())


def least(values):
    return min(range(len(values)), key=values.__getitem__)


@fault(role="interleave", caught_by=DECLARED, seen_in="own")
def counts_rows_instead_of_targets(reference):
    """Shares are of rows: a source of short documents gets less than was declared."""

    def interleave(targets, weights, seed, shuffle):
        chosen = reference.interleave(targets, weights, seed, shuffle)
        ones = [(counts > 0).long() for counts in targets]
        by_rows = reference.interleave(ones, chosen.shares, seed, shuffle)
        by_rows.num_targets = lambda start, stop: sum(
            int(targets[source][row]) for source, _, row in by_rows.rows(start, stop).tolist()
        )
        return by_rows

    return interleave


@fault(role="interleave", caught_by=DECLARED, seen_in="own")
def ignores_the_weights(reference):
    """Sources are mixed by their sizes whatever was declared."""
    return lambda targets, weights, seed, shuffle: reference.interleave(
        targets, None, seed, shuffle
    )


@fault(role="interleave", caught_by=DECLARED, seen_in="own")
def draws_the_next_source(reference):
    """The next source is drawn with its weight: its share is right only in the long run."""

    def interleave(targets, weights, seed, shuffle):
        rng = random.Random(seed)

        def draw(consumed, shares, ahead):
            return rng.choices(range(len(shares)), shares)[0]

        return OneByOne(targets, weights, seed, shuffle, draw)

    return interleave


class Changed:
    """An interleaving whose rows are changed by `change(rows [n, 3])`."""

    def __init__(self, inner, targets, change):
        self._inner, self._targets, self._change = inner, targets, change
        self.shares, self.rows_per_epoch = inner.shares, inner.rows_per_epoch

    def rows(self, start, stop):
        return self._change(self._inner.rows(0, stop))[start:]

    def num_targets(self, start, stop):
        rows = self.rows(start, stop).tolist()
        return sum(int(self._targets[source][row]) for source, _, row in rows)


@fault(role="interleave", caught_by=[DECLARED, NATURAL], seen_in="own")
def one_source_after_the_other(reference):
    """The sources of an epoch are read one after the other, not mixed."""

    def interleave(targets, weights, seed, shuffle):
        inner = reference.interleave(targets, None, seed, shuffle)

        def sorted_in_epochs(rows):
            epoch_and_source = rows[:, 1] * len(targets) + rows[:, 0]
            return rows[epoch_and_source.argsort(stable=True)]

        return Changed(inner, targets, sorted_in_epochs)

    return interleave


@fault(role="interleave", caught_by=[DECLARED, NATURAL], seen_in="own")
def repeats_before_an_epoch_ends(reference):
    """A row of a source stands for the one after it as well: it comes twice, the other never."""

    def interleave(targets, weights, seed, shuffle):
        inner = reference.interleave(targets, weights, seed, shuffle)
        used = [counts.nonzero()[:, 0].tolist() for counts in targets]

        def first_twice(rows):
            rows = rows.clone()
            for row in rows:
                own = used[int(row[0])]
                row[2] = own[0] if int(row[2]) == own[-1] else row[2]
            return rows

        return Changed(inner, targets, first_twice)

    return interleave


@fault(
    role="interleave",
    caught_by=EPOCHS,
    seen_in="huggingface/trl PR#6351, lancedb/lancedb#3705",
)
def interleaves_the_same_order_every_epoch(reference):
    """The epoch reaches the shuffle of one source alone, not that of several."""

    def interleave(targets, weights, seed, shuffle):
        return reference.interleave(targets, weights, seed, lambda n, seed, _: shuffle(n, seed, 0))

    return interleave


@fault(role="interleave", caught_by=EPOCHS, seen_in="own")
def shuffles_all_sources_alike(reference):
    """The source is not part of the seed: sources of a size have one order."""

    def interleave(targets, weights, seed, shuffle):
        return reference.interleave(
            targets, weights, seed, lambda n, _, epoch: shuffle(n, seed, epoch)
        )

    return interleave


@fault(role="interleave", caught_by=PLACES, seen_in="huggingface/datasets#8308, PR#8295")
def goes_on_from_the_last_call(reference):
    """The place asked for is not looked at: the rows behind those handed out last come next."""

    def interleave(targets, weights, seed, shuffle):
        inner = reference.interleave(targets, weights, seed, shuffle)
        rows, done = inner.rows, 0

        def following(start, stop):
            nonlocal done
            done += stop - start
            return rows(done - stop + start, done)

        inner.rows = following
        return inner

    return interleave


@benign(
    role="interleave",
    accepted_by=[SHARES, PLACES, "m1_loader::test_resumed", "m1_loader::test_once_an_epoch"],
    because="whichever source is furthest behind after its next row keeps the same bound",
)
def looks_at_the_next_row(reference):
    """The source whose next row brings it the least far comes next, one row after the other."""

    def interleave(targets, weights, seed, shuffle):
        def furthest_behind(consumed, shares, ahead):
            after = zip(consumed, ahead, shares, strict=True)
            return least([(done + more) / share for done, more, share in after])

        return OneByOne(targets, weights, seed, shuffle, furthest_behind)

    return interleave
