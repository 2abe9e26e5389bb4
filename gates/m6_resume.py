"""M6. A run of several ranks that was killed and goes on is the run that was never killed."""

from __future__ import annotations

import pytest

from gates import rank_runs, runs
from gates.distributed import targeted_rows
from harness import gate
from reference.replay_command import replay

SAVED = 5  # updates: in the second epoch


@gate(
    claim="killed and gone on with in new processes, two ranks have the same state, random states, "
    "tokens, losses, norms and parameters as if they had not been killed, bit for bit",
    roles=["save", "load", "train", "distribute", "accumulate"],
    not_claimed="another number of ranks, another machine",
    source="issue 5; NVIDIA/Megatron-LM PR#6858: the random state of one rank for all",
)
def test_resume(stack, ranks, rng, tmp_path, check):
    source, folder = runs.text(stack, rng), tmp_path / "run"
    first = ranks.run(rank_runs.whole_and_killed, source, folder, SAVED, world_size=2)
    drops = {whole.updates[0].before["random/cpu"] for whole, _ in first}
    check("random states at the start", len(drops), equal=2, because="each rank has its own")
    resumed = ranks.run(rank_runs.resumed_run, source, folder, SAVED, world_size=2)
    for (whole, killed), got in zip(first, resumed, strict=True):
        check("how the whole run ended", whole.ended, equal="finished", because="left alone")
        check("how the killed run ended", killed.ended, equal="interrupted", because="as planned")
        runs.compare(check, got, whole, SAVED)


@gate(
    claim="saved by two ranks and gone on with by one, a run reads every token that it would have "
    "read, at the same learning rates, and its losses are those but for rounding",
    roles=["save", "load", "train", "distribute", "accumulate"],
    not_claimed="dropout, which draws others; bits of the losses",
    source="NVIDIA-NeMo/Megatron-Bridge PR#5637, PR#3503: 2 ranks to 1 kept the place of rank 0 "
    "alone, or left out what was consumed",
)
def test_other_number(stack, ranks, rng, device, tmp_path, check):
    source, folder = runs.text(stack, rng), tmp_path / "run"
    whole = runs.train(stack, source, device)
    killed = ranks.run(rank_runs.killed_run, source, folder, SAVED, world_size=2)
    for run in killed:
        check("how the killed run ended", run.ended, equal="interrupted", because="as planned")
    keeper = runs.checkpoints(folder, SAVED, resume=True)
    resumed = runs.train(stack, source, device, keeper)
    check("how the resumed run ended", resumed.ended, equal="finished",
          because="another number of ranks is functional")  # fmt: skip
    want = whole.updates[SAVED:]
    check("updates made by the resumed run", len(resumed.updates), equal=len(want),
          because=f"{runs.NUM_UPDATES} are asked for, {SAVED} were saved")  # fmt: skip
    pairs = list(zip(resumed.updates, want, strict=True))
    same = {
        "text": lambda update: update.window,
        "number of targets": lambda update: update.record.counters.tokens_updated,
        "learning rate": lambda update: update.record.learning_rate,
    }
    for what, of in same.items():
        other = [number for number, (a, b) in enumerate(pairs, 1) if of(a) != of(b)]
        check(f"updates with another {what}", other, equal=[],
              because="it is the run's, however many ranks there are")  # fmt: skip
    errors = [abs(a.record.loss_nats / b.record.loss_nats - 1) for a, b in pairs]
    check("largest relative error of a loss", max(errors), at_most=1e-4,
          because="float32 sums in another order, through five updates of AdamW; other moments or "
          "parameters are off by percents")  # fmt: skip


@gate(
    claim="what two ranks save beside training is the instant at which it was asked for, on both, "
    "and appears when both have written it",
    roles=["save", "load", "train", "distribute", "accumulate"],
    not_claimed="how long training stands still: python -m reference.checkpoint.stall",
    source="issue 5, point 2; pytorch async_save: what is changed after it returns is not saved",
)
def test_background(stack, ranks, rng, tmp_path, check):
    source, folder = runs.text(stack, rng), tmp_path / "run"
    first = ranks.run(rank_runs.whole_and_held, source, folder, SAVED, world_size=2)
    check("published before the files of the last rank were written", first[-1][2], equal=[],
          because="a manifest names files that are there")  # fmt: skip
    resumed = ranks.run(rank_runs.resumed_run, source, folder, SAVED, world_size=2)
    for (whole, killed, _), got in zip(first, resumed, strict=True):
        check("how the killed run ended", killed.ended, equal="interrupted", because="as planned")
        runs.compare(check, got, whole, SAVED)


def place_of(found):
    """The tensor that was not finite first, without its microbatch: ranks have others."""
    return "" if found is None else found.partition(":")[0].rpartition(", ")[2]


@gate(
    claim="an update that goes wrong on two ranks is kept with the rows of both, and one process "
    "runs it again: the loss is the same but for rounding, and so is the first wrong tensor",
    roles=["save", "train", "distribute", "accumulate", "clip_grad_norm"],
    not_claimed="dropout, which draws others; what is an anomaly: tests/reference/test_anomaly.py",
    source="issue 5, point 6; of what one rank has kept, one sees what went wrong there alone",
)
@pytest.mark.parametrize("how", ["norm", "overflow"])
def test_anomaly(stack, ranks, how, rng, device, tmp_path, check):
    source = runs.text(stack, rng)
    one, two = tmp_path / "one", tmp_path / "two"
    alone, _ = rank_runs.gone_wrong(None, stack, source, one, how, device)
    together = ranks.run(rank_runs.gone_wrong, source, two, how, world_size=2)
    for run in [alone, *(run for run, _ in together)]:
        check(
            "how a run ended", run.ended, equal="interrupted", because="what was wrong is skipped"
        )
    name = f"anomaly-{rank_runs.NUM_BEFORE:08d}"
    for folder in (one, two):
        check(f"kept in {folder.name}", [path.name for path in folder.glob("anomaly-*")],
              equal=[name], because="it is the first that is not finite")  # fmt: skip
    want, got = replay(one / name, device), replay(two / name, device)
    rows = sorted(row for _, of_rank in together for row in of_rank)
    check("rows kept that the ranks read", sorted(targeted_rows(got.kept.window)) == rows,
          equal=True, because="the update is made of all of them")  # fmt: skip
    check("first wrong tensor", place_of(got.not_finite_first),
          equal=place_of(want.not_finite_first), because="it is the same update")  # fmt: skip
    if how == "norm":
        error = abs(got.record.loss_nats / got.kept.anomaly.loss_nats - 1)
        check("relative error of the loss", error, at_most=1e-5,
              because="the same parameters and rows, float32 sums in another order")  # fmt: skip
