"""M2. Killed, refused by the disk or met by another writer, a save leaves the old or the new."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gates import crashes, fresh_process, kill_test, runs, snapshots
from harness import gate
from reference.checkpoint import Expected, Snapshot, capture, expected, latest

NUM_KILLS = 20
# What stands in the folder before the save, and how many checkpoints are kept.
FOLDERS = {"first": (0, 2), "second": (1, 2), "only-one-kept": (1, 1)}


@dataclass
class Saving:
    """A save into a folder that holds `base`, again and again from the same start."""

    stack: Any
    folder: Path
    snapshots: dict[str, Snapshot]
    expectation: Expected
    num_before: int
    keep_last: int
    num_copies: int = 0

    def fresh(self) -> Path:
        """A folder as it was before the save."""
        self.num_copies += 1
        return Path(shutil.copytree(self.folder / "base", self.folder / str(self.num_copies)))

    def save(self, root: Path, which: str = "new") -> Callable[[], None]:
        """The call that saves one of the snapshots there."""

        def call() -> None:
            self.stack.save(root, self.snapshots[which], self.keep_last, 0)

        return call

    def found(self, root: Path) -> str:
        """Which snapshot the newest checkpoint is, bit for bit; "none", or what is wrong."""
        newest = latest(root)
        if newest is None:
            return "none"
        try:
            got = snapshots.parts(self.stack.load(newest, self.expectation))
        except ValueError as error:
            return f"refused: {error}"
        want = {name: snapshots.parts(snapshot) for name, snapshot in self.snapshots.items()}
        return next((name for name, parts in want.items() if parts == got), "a mixture")

    @property
    def acceptable(self) -> tuple[str, str]:
        """What may be found behind a save that did not end."""
        return ("old" if self.num_before else "none", "new")


def prepared(stack: Any, rng: torch.Generator, tmp_path: Path, case: str) -> Saving:
    """Snapshots of a run after 2, 3 and 4 updates, and one of another run after 3."""
    num_before, keep_last = FOLDERS[case]
    training = snapshots.trained(stack, rng, num_updates=2, num_layers=1)
    taken = {}
    for name in ("old", "new", "newer"):
        taken[name] = capture(training, snapshots.SETTINGS, {"window": len(taken)}, {})
        snapshots.update(stack, training, rng)
    taken["rival"] = replace(taken["newer"], counters=taken["new"].counters)
    expectation = expected(training, snapshots.SETTINGS)
    saving = Saving(stack, tmp_path, taken, expectation, num_before, keep_last)
    (tmp_path / "base").mkdir()
    if num_before:
        saving.save(tmp_path / "base", "old")()
    return saving


@gate(
    claim="killed at any operation on the disk, a save leaves the old or the new checkpoint whole, "
    "and the next save goes through and clears away what was left",
    roles=["save", "load"],
    not_claimed="a power cut, which loses what was not synced: test_synced; in the first two "
    "cases, each write of several in a row: only the first and the last",
    source="Lightning-AI/pytorch-lightning#688, PrimeIntellect-ai/prime-rl PR#2992: a kill in the "
    "middle of a save destroyed the file before it",
)
@pytest.mark.parametrize("case", FOLDERS)
def test_killed_at_every_operation(stack, case, rng, tmp_path, check):
    saving = prepared(stack, rng, tmp_path, case)
    root = saving.fresh()
    whole = crashes.run(saving.save(root))
    check("how a save that is left alone ends", whole.ended, equal="returned", because="it can")
    check("what is found behind it", saving.found(root), equal="new", because="it was saved")
    check("operations on the disk", len(whole.operations), at_least=3,
          because="less than a file opened, synced and renamed is no save")  # fmt: skip
    torn, stuck, all_of_them = [], [], range(len(whole.operations))
    for at in all_of_them if case == "only-one-kept" else crashes.turns(whole.operations):
        root = saving.fresh()
        crashes.run(saving.save(root), interfere=crashes.killed_at(at))
        after_a_kill(saving, root, f"before {whole.operations[at]} {at}", torn, stuck)
        if torn or stuck:
            break
    check_kills(check, torn, stuck)


@gate(
    claim="killed at any byte of any file, a save leaves the old or the new checkpoint whole",
    roles=["save", "load"],
    not_claimed="every byte: the first ones, the middle and the last one of each file",
    source="issue 5; whatever writes, the kernel ends the process at that byte (RLIMIT_FSIZE)",
)
@pytest.mark.parametrize("case", ["second", "only-one-kept"])
def test_killed_inside_a_file(stack, case, rng, tmp_path, check):
    saving = prepared(stack, rng, tmp_path, case)
    root = saving.fresh()
    saving.save(root)()
    sizes = crashes.contents(latest(root)).values()
    offsets = {offset for size in sizes for offset in (0, 1, 8, size // 2, size - 1)}
    torn, stuck = [], []
    for offset in sorted(offsets):
        root = saving.fresh()
        ended = crashes.run(
            saving.save(root), largest_file_bytes=offset, killed_by_the_limit=True
        ).ended
        check("how the save ended", ended, equal="killed", because="some file is longer")
        after_a_kill(saving, root, f"at byte {offset}", torn, stuck)
        if torn or stuck:
            break
    check_kills(check, torn, stuck)


def after_a_kill(saving: Saving, root: Path, where: str, torn: list[str], stuck: list[str]) -> None:
    """Notes what is wrong with a folder, and with the next save into it."""
    found = saving.found(root)
    if found not in saving.acceptable:
        torn.append(f"{where}: {found}")
    try:
        saving.save(root, "newer")()
    except (OSError, ValueError) as error:
        stuck.append(f"{where}: {error}")
        return
    left = sorted(path.name for path in root.iterdir() if not path.name.startswith("step-"))
    if saving.found(root) != "newer" or left:
        stuck.append(f"{where}: then {saving.found(root)} is found, and {left} are left")


def check_kills(check: Callable[..., None], torn: list[str], stuck: list[str]) -> None:
    check("kills that left neither the old nor the new", torn, equal=[],
          because="a folder that exists is a whole checkpoint or none")  # fmt: skip
    check("kills after which the next save went wrong", stuck, equal=[],
          because="a run that is killed often must not fill its disk or stop for good")  # fmt: skip


@gate(
    claim="everything of a checkpoint is on the disk before it gets its name, and the name is, "
    "before the save returns",
    roles=["save"],
    not_claimed="disks that lie about their cache; what fsync means elsewhere",
    source="issue 5: fsync, then one rename; a rename can reach the disk before the content",
)
def test_synced(stack, rng, tmp_path, check):
    saving = prepared(stack, rng, tmp_path, "first")
    root = tmp_path / "run"
    outcome = crashes.run(saving.save(root))
    check("how the save ended", outcome.ended, equal="returned", because="it was left alone")
    renames = [at for at, name in enumerate(outcome.operations) if name == "rename"]
    check("renames", len(renames), at_least=1, because="the one that publishes")
    published, when = latest(root), outcome.synced
    late = [
        path.name
        for path in [published, *published.rglob("*")]
        if when.get(crashes.identity(path), renames[-1]) >= renames[-1]
    ]
    check("not synced before the rename", late, equal=[],
          because="after a power cut a name without its content would be found")  # fmt: skip
    check("the folder that holds the name was synced after the rename",
          when.get(crashes.identity(root), -1) > renames[-1], equal=True,
          because="or a save that returned is gone after a power cut")  # fmt: skip
    check("the folder above a new one was synced", crashes.identity(tmp_path) in when,
          equal=True, because="or all of it is gone after a power cut")  # fmt: skip


@gate(
    claim="refused by a disk that is full or read-only, a save says so, keeps the old and leaves "
    "nothing",
    roles=["save", "load"],
    not_claimed="a disk that stays full: then the next save fails too",
    source="issue 5; a save that fails in silence is found out at the resume",
)
@pytest.mark.parametrize("case", ["full", "largest-file", "read-only", "no-folder"])
def test_refused_by_the_disk(stack, case, rng, tmp_path, check):
    saving = prepared(stack, rng, tmp_path, "second")
    silent, damaged, left = [], [], []
    for where, root, how, words in refusals(saving, case):
        before = crashes.contents(root)
        ended = crashes.run(saving.save(root), **how).ended
        found = saving.found(root) if root.is_dir() else "old"
        told = ended.startswith("raised ") and words in ended
        if not told and (ended, found) != ("returned", "new"):
            silent.append(f"{where}: {ended}, {found} is found")
        if found not in saving.acceptable:
            damaged.append(f"{where}: {found}")
        if found == "old" and crashes.contents(root) != before:
            left.append(where)
        if silent or damaged or left:
            break
    check("refusals in silence", silent, equal=[], because="who saves must know that it failed")
    check("refusals that damaged the old one", damaged, equal=[], because="it is all there is")
    check("refusals that left files", left, equal=[], because="a full disk needs its room")


def refusals(saving: Saving, case: str):
    """(where, folder, how the disk refuses, words that the error must hold)."""
    if case == "full":
        operations = crashes.run(saving.save(saving.fresh())).operations
        for at in crashes.turns(operations):
            how = {"interfere": crashes.full_at(at)}
            yield f"{operations[at]} {at}", saving.fresh(), how, "No space left"
    elif case == "largest-file":
        for offset in (0, 1, 100, 1000):
            yield f"byte {offset}", saving.fresh(), {"largest_file_bytes": offset}, "too large"
    elif case == "read-only":
        how = {"interfere": crashes.read_only}
        yield "every operation", saving.fresh(), how, "Read-only"
    else:
        file = saving.folder / "file"
        file.write_text("not a folder")
        yield "a file in the place of the folder", file, {}, str(file)


@gate(
    claim="of two writers of one step one wins and the other is told; writers of two steps do not "
    "disturb each other",
    roles=["save", "load"],
    not_claimed="writers on two hosts of one network file system",
    source="issue 5: a run that was started twice",
)
@pytest.mark.parametrize("rival", ["same-step", "next-step"])
def test_two_writers(stack, rival, rng, tmp_path, check):
    saving = prepared(stack, rng, tmp_path, "second")
    other = "rival" if rival == "same-step" else "newer"
    operations = crashes.run(saving.save(saving.fresh())).operations
    wrong, num_stopped = [], 0
    for at in crashes.turns(operations):
        root = saving.fresh()
        slow = crashes.Process(saving.save(root), interfere=crashes.stopped_at(at))
        num_stopped += slow.wait_until_stopped()
        second = crashes.run(saving.save(root, other)).ended
        slow.go_on()
        first = slow.wait().ended
        want = (
            {("returned", "new"), ("raised", other)}
            if other == "rival"
            else {("returned", "newer")}
        )
        if (first.partition(" ")[0], saving.found(root)) not in want or (
            (second == "returned") != (saving.found(root) == other)
        ):
            wrong.append(f"{at}: {first}; {second}; {saving.found(root)} is found")
            break
    check("pairs of writers that went wrong", wrong, equal=[],
          because="who is told that it saved has saved; the newest is whole")  # fmt: skip
    check("pairs of writers in which one was stopped", num_stopped, at_least=3,
          because="or nothing was tried")  # fmt: skip


@gate(
    claim="runs killed at random instants go on to be the run that was never killed: nothing "
    "broken, nothing lost that was committed, nothing done twice but what was not",
    roles=["save", "load", "train"],
    not_claimed="power cuts; runs on an accelerator, which a forked process cannot use",
    source="issue 5; `python -m gates.kill_test --kills 200` does it at length",
)
def test_killed_at_random(stack, recipe, rng, tmp_path, check):
    # In a process of its own: once autograd ran on an accelerator, no fork can train.
    seed = int(torch.randint(2**31, (), generator=rng))
    arguments = (runs.text(stack, rng), tmp_path, NUM_KILLS, seed)
    report = fresh_process.call(recipe, kill_test.kill_runs, "cpu", *arguments)
    check("broken checkpoints", report.broken, equal=[], because="old or new, never between")
    check("committed updates that are lost", report.lost, equal=[],
          because="a save that returned is on the disk")  # fmt: skip
    check("resumes that are another run", report.astray, equal=[],
          because="the next update, from the same state, on the same tokens")  # fmt: skip
    check("kills that hit a running process", report.kills, equal=NUM_KILLS,
          because="as many as were asked for")  # fmt: skip
