"""M2. A run that was killed and goes on is, bit for bit, the run that was never killed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gates import fresh_process, runs
from harness import gate, not_run


@dataclass(frozen=True)
class Case:
    """saved: the updates after which the run is saved, killed, and gone on with. num_workers: of
    the loader, which are ahead of the run when it is killed; 0: no loader.
    """

    saved: tuple[int, ...]
    dropout: bool = False
    num_workers: int = 0
    background: bool = False
    inside_accumulation: bool = False


# Four windows are an epoch. Each kill comes one update after the save, which is lost with it.
CASES = {
    "mid-epoch": Case(saved=(5,)),
    "epoch-end": Case(saved=(8,)),
    "twice": Case(saved=(5, 6), num_workers=runs.NUM_WORKERS),
    "dropout": Case(saved=(7,), dropout=True),
    "accumulation": Case(saved=(5,), inside_accumulation=True),
    "workers": Case(saved=(5,), num_workers=runs.NUM_WORKERS),
    "background": Case(saved=(5,), background=True),
}


def until_killed(stack, source, device, folder, case, saved, done):
    """The part of a run from update `done` to the kill that comes behind the save at `saved`."""
    keeper = runs.checkpoints(folder, saved, resume=done > 0, background=case.background)
    num_lost = 0 if case.inside_accumulation else 1
    return runs.train(
        stack, source, device, keeper, saved - done + num_lost, case.inside_accumulation
    )


@gate(
    claim="killed after a save and gone on with, a run reads the same tokens and has the same "
    "state, learning rates, losses, norms and parameters, bit for bit",
    roles=["save", "load", "train", "loader"],
    not_claimed="several processes, another number of them, another machine",
    source="issue 5; faults of resume show at the first, second or third loss: at least five "
    "updates are compared, and the state before them",
)
@pytest.mark.parametrize("name", CASES)
def test_resume(stack, name, rng, device, tmp_path, check):
    case, done, ahead = CASES[name], 0, []
    stack = runs.with_dropout(stack) if case.dropout else stack
    source = runs.text(stack, rng, case.num_workers)
    whole = runs.train(stack, source, device)
    check("how the whole run ended", whole.ended, equal="finished", because="it was left alone")
    for saved in case.saved:
        killed = until_killed(stack, source, device, tmp_path / "run", case, saved, done)
        check("how the killed run ended", killed.ended, equal="interrupted", because="as planned")
        same = whole.updates[done : done + len(killed.updates)]
        runs.check_updates(check, "killed", killed.updates, same)
        ahead.append(killed.was_ahead)
        done = saved
    keeper = runs.checkpoints(tmp_path / "run", saved, resume=True, background=case.background)
    resumed = runs.train(stack, source, device, keeper)
    runs.compare(check, resumed, whole, done)
    if case.num_workers and not all(ahead):
        not_run("The loader on trial had made nothing ahead when the run was killed.")


@gate(
    claim="a new process goes on from the files alone",
    roles=["save", "load", "train", "loader"],
    not_claimed="another machine, another version of torch",
    source="issue 5; what stays in the memory of the process that saved is lost when it dies",
)
def test_another_process(stack, recipe, rng, device, tmp_path, check):
    case = Case(saved=(5,), dropout=True)
    watched = runs.with_dropout(stack)
    source = runs.text(stack, rng, runs.NUM_WORKERS)
    whole = runs.train(watched, source, device)
    killed = until_killed(watched, source, device, tmp_path / "run", case, 5, 0)
    check("how the killed run ended", killed.ended, equal="interrupted", because="as planned")
    arguments = (source, device, tmp_path / "run", 5)
    resumed = fresh_process.call(recipe, go_on, device, *arguments)
    runs.compare(check, resumed, whole, 5)


def go_on(stack, source, device, folder, every):
    """The run in `folder`, with dropout, to its end."""
    keeper = runs.checkpoints(folder, every, resume=True)
    return runs.train(runs.with_dropout(stack), source, device, keeper)
