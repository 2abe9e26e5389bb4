"""M6. A run of several ranks that was killed and goes on is the run that was never killed."""

from __future__ import annotations

from gates import rank_checkpoints, runs
from harness import gate

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
    first = ranks.run(rank_checkpoints.whole_and_killed, source, folder, SAVED, world_size=2)
    drops = {whole.updates[0].before["random/cpu"] for whole, _ in first}
    check("random states at the start", len(drops), equal=2, because="each rank has its own")
    resumed = ranks.run(rank_checkpoints.resumed_run, source, folder, SAVED, world_size=2)
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
    killed = ranks.run(rank_checkpoints.killed_run, source, folder, SAVED, world_size=2)
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
