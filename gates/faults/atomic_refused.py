"""Saves that a full disk silences, or that undo what another writer did."""

from __future__ import annotations

import shutil
from unittest import mock

from gates.faults.atomic import REFUSED, WRITERS, steps
from harness import fault
from reference.checkpoint import FolderTakenError


@fault(role="save", caught_by=REFUSED, seen_in="own")
def goes_on_without_a_checkpoint(reference):
    """An error of the disk is logged, so that training goes on; nobody reads the log."""

    def save(root, snapshot, last, every):
        try:
            return reference.save(root, snapshot, last, every)
        except OSError:
            return root

    return save


@fault(
    role="save",
    caught_by=[f"{REFUSED}[full]", f"{REFUSED}[largest-file]"],
    seen_in="howervoo/speechturn#15",
)
def leaves_half_a_checkpoint_on_a_full_disk(reference):
    """What was written before the disk was full stays there."""

    def save(root, snapshot, last, every):
        with mock.patch("reference.checkpoint.disk.unlink", lambda path: None):
            return reference.save(root, snapshot, last, every)

    return save


@fault(
    role="save",
    caught_by=f"{REFUSED}[largest-file]",
    seen_in="own",
)
def makes_room_by_removing_the_old(reference):
    """When the disk is full, the last good checkpoint is removed and the save tried again."""

    def save(root, snapshot, last, every):
        try:
            return reference.save(root, snapshot, last, every)
        except OSError:
            for folder in steps(root):
                shutil.rmtree(folder)
            return reference.save(root, snapshot, last, every)

    return save


# --- two writers -----------------------------------------------------------------------------


@fault(role="save", caught_by=f"{WRITERS}[same-step]", seen_in="own")
def replaces_the_other_writer_s(reference):
    """A checkpoint of that step that is there already is removed, whoever wrote it."""

    def save(root, snapshot, last, every):
        try:
            return reference.save(root, snapshot, last, every)
        except FolderTakenError:
            shutil.rmtree(steps(root)[-1])
            return reference.save(root, snapshot, last, every)

    return save


@fault(role="save", caught_by=f"{WRITERS}[next-step]", seen_in="own")
def clears_away_living_writers(reference):
    """Every temporary folder is taken for that of a dead writer."""

    def save(root, snapshot, last, every):
        for folder in root.glob(".step-*"):
            shutil.rmtree(folder)
        return reference.save(root, snapshot, last, every)

    return save


@fault(role="save", caught_by=f"{WRITERS}[same-step]", seen_in="own")
def takes_the_other_writer_s_for_its_own(reference):
    """A checkpoint of that step is there, so the save is said to have been done."""

    def save(root, snapshot, last, every):
        try:
            return reference.save(root, snapshot, last, every)
        except FolderTakenError:
            return steps(root)[-1]

    return save
