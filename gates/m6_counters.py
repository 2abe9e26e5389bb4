"""M6. What a run counts, logs and reads is that of one process, on any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from gates import distributed, rank_programs, toys
from harness import Stack, gate
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import train
from reference.update import UpdateSettings

# 40 targets a window; the total ends 24 targets into the fourth. 4 rows a microbatch, and in every
# other window 1 or 2: fewer than there are ranks.
COUNTS = (16, 1, 0, 3, 16, 2, 0, 2)
TOTAL_TOKENS = 144
SETTINGS = UpdateSettings(Schedule(1e-2, 200, 60, 80))
SAME = "every rank reports the run, not its share"


def windows_of(rng):
    return [toys.ragged_window(rng, COUNTS).split(k) for k in (2, 6, 2, 6, 2)]


@gate(
    claim="loss, counters and learning rate of every update are those of one process, on all ranks",
    roles=["train", "update_window", "accumulate", "learning_rate", "distribute"],
    not_claimed="the bits of the loss: sums are taken in another order",
    source="huggingface/accelerate#662: a schedule stepped once a rank ends its warmup W times too "
    "early; ml-explore/mlx-lm PR#1413, the last window",
)
@pytest.mark.parametrize("last_window", ["trim", "overshoot"])
def test_records(stack, ranks, world_size, last_window, rng, check):
    windows = windows_of(rng)
    arguments = (toys.TINY, windows, SETTINGS, TOTAL_TOKENS, last_window)
    outcome = ranks.run(rank_programs.trained, *arguments, world_size=world_size, may_fail=True)
    distributed.check_ends(check, outcome, "all ranks stop after the same update")
    results = outcome.results
    one = train(
        toys.TINY, Stack(ROLES), windows, SETTINGS, 0, "cpu", TOTAL_TOKENS, last_window
    ).records
    for result in results:
        records = result.records
        check("updates", len(records), equal=4, because="144 targets in windows of 40")
        for got, want in zip(records, one, strict=True):
            check("read, supervised, updated, steps", list(vars(got.counters).values()),
                  equal=list(vars(want.counters).values()), because=SAME)  # fmt: skip
            check("targets and tokens", [got.num_targets, got.num_tokens],
                  equal=[want.num_targets, want.num_tokens], because=SAME)  # fmt: skip
            check("learning rate", got.learning_rate, equal=want.learning_rate,
                  because="a function of the tokens, whoever read them")  # fmt: skip
            check(
                "relative error of the loss",
                abs(got.loss_nats / want.loss_nats - 1),
                at_most=1e-5,
                because="summed nats over summed tokens in float32; a mean of means is 1 % off",
            )
    applied = results[0].records[-1].counters.tokens_updated
    check("targets applied", applied, equal=144 if last_window == "trim" else 160,
          because="of all ranks together: trimmed to the total, or the whole window")  # fmt: skip
    told = [repr(result.records) for result in results]
    check("different records", len(set(told)), equal=1, because="bit for bit, on all ranks")
    digests = {distributed.digest(result.parameters) for result in results}
    check("different parameters", len(digests), equal=1, because="bit for bit, on all ranks")


@gate(
    claim="all ranks together read every row of a window once, and nothing else",
    roles=["train", "accumulate"],
    not_claimed="which rank reads which row",
    source="metagene-ai/metagene-pretrain PR#18: look-ahead samples that the next rank reads too",
)
def test_every_row_once(stack, ranks, world_size, rng, check):
    windows = windows_of(rng)[:3]
    arguments = (toys.TINY, windows, SETTINGS, None, "overshoot")
    results = ranks.run(rank_programs.trained, *arguments, world_size=world_size)
    for index, window in enumerate(windows):
        read = Counter(row for result in results for row in result.rows[index])
        there = Counter(distributed.targeted_rows(window))
        missing, more = there - read, read - there
        check("rows that no rank read", missing.total(), equal=0, because="each is in the window")
        check("rows read twice, or not there", more.total(), equal=0, because="each counts once")
