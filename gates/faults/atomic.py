"""Saves that a kill tears, or a power cut would."""

from __future__ import annotations

import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from harness import benign, fault
from reference.checkpoint.commit import step_name
from reference.checkpoint.files import MANIFEST, FileRecord
from reference.checkpoint.tensors import sha256
from reference.checkpoint.write import write_files

FILE = "m2_atomic::"
OPERATIONS, INSIDE = f"{FILE}test_killed_at_every_operation", f"{FILE}test_killed_inside_a_file"
SYNCED, REFUSED = f"{FILE}test_synced", f"{FILE}test_refused_by_the_disk"
WRITERS, RANDOM = f"{FILE}test_two_writers", f"{FILE}test_killed_at_random"


def steps(root):
    """The checkpoints of a folder, the oldest first."""
    return sorted(root.glob("step-*"))


def encoded(root, snapshot):
    """(where a checkpoint is to go, {file: its bytes}), the manifest last."""
    files = {}

    def keep(name, pieces):
        files[name] = b"".join(map(bytes, pieces))
        return FileRecord(len(files[name]), sha256([files[name]]))

    manifest = write_files(snapshot, keep)
    root.mkdir(parents=True, exist_ok=True)
    return root / step_name(snapshot.counters.optimizer_steps), {**files, MANIFEST: manifest}


@fault(
    role="save",
    caught_by=[f"{OPERATIONS}[only-one-kept]", f"{INSIDE}[only-one-kept]"],
    seen_in="Lightning-AI/pytorch-lightning#688",
)
def removes_the_old_before_the_new(reference):
    """Room is made first: the old checkpoint goes before the new one is there."""

    def save(root, snapshot, last, every):
        for folder in steps(root)[: -last + 1 or None]:
            shutil.rmtree(folder)
        return reference.save(root, snapshot, last, every)

    return save


def overwriting(pause_s):
    """A save that renames the newest folder and writes the new files over its own."""

    def save(root, snapshot, last, every):
        target, files = encoded(root, snapshot)
        if steps(root):
            steps(root)[-1].rename(target)
        else:
            target.mkdir()
        for name, content in files.items():
            (target / name).write_bytes(content)
            time.sleep(pause_s)
        return target

    return save


@fault(
    role="save",
    caught_by=[f"{OPERATIONS}[second]", INSIDE],
    seen_in="PrimeIntellect-ai/prime-rl PR#2992",
)
def writes_over_the_old_one(reference):
    """The files are opened for writing where the old ones are."""
    return overwriting(0.0)


@fault(role="save", caught_by=RANDOM, seen_in="harvard-edge/cs249r_book PR#2068")
def writes_over_the_old_one_on_a_slow_disk(reference):
    """As above, and it takes time: one kill in two comes in between."""
    return overwriting(0.02)


@fault(role="save", caught_by=f"{OPERATIONS}[first]", seen_in="own")
def reserves_room_and_names_it_complete(reference):
    """Manifest and empty files of the right size first, what is in them afterwards."""

    def save(root, snapshot, last, every):
        target, files = encoded(root, snapshot)
        target.mkdir()
        for name, content in files.items():
            room = content if name == MANIFEST else bytes(len(content))
            (target / name).write_bytes(room)
        for name, content in files.items():
            with (target / name).open("r+b") as file:
                file.write(content)
        return target

    return save


@fault(role="save", caught_by=f"{OPERATIONS}[second]", seen_in="howervoo/speechturn#15")
def leaves_what_dead_writers_left(reference):
    """Temporary folders of writers that were killed stay for ever."""

    def save(root, snapshot, last, every):
        with mock.patch("reference.checkpoint.commit.remove_leftovers", lambda root: None):
            return reference.save(root, snapshot, last, every)

    return save


@fault(
    role="save",
    caught_by=RANDOM,
    seen_in="Lightning-AI/pytorch-lightning PR#21079",
)
def says_saved_before_it_is(reference):
    """A save returns when it is queued; it is written when the next one is."""
    queued = []

    def save(root, snapshot, last, every):
        queued.append(snapshot)
        if len(queued) > 1:
            return reference.save(root, queued.pop(0), last, every)
        return root

    return save


# --- what a power cut would lose -------------------------------------------------------------


@fault(role="save", caught_by=SYNCED, seen_in="own")
def never_syncs(reference):
    """Nothing is synced: the rename may reach the disk before the content."""

    def save(root, snapshot, last, every):
        with mock.patch("os.fsync", lambda descriptor: None):
            return reference.save(root, snapshot, last, every)

    return save


@fault(role="save", caught_by=SYNCED, seen_in="own")
def syncs_files_but_no_folder(reference):
    """The content is on the disk, the names of the files may not be."""
    real = os.fsync

    def save(root, snapshot, last, every):
        sync = os.fsync if os.fsync is not real else real

        def files_only(descriptor):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                sync(descriptor)

        with mock.patch("os.fsync", files_only):
            return reference.save(root, snapshot, last, every)

    return save


@fault(role="save", caught_by=SYNCED, seen_in="own")
def makes_the_folder_and_does_not_sync_its_name(reference):
    """The folder of all checkpoints is new, and the one above it is not synced."""

    def save(root, snapshot, last, every):
        root.mkdir(exist_ok=True)
        return reference.save(root, snapshot, last, every)

    return save


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="save",
    accepted_by=[
        f"{OPERATIONS}[first]",
        f"{OPERATIONS}[second]",
        f"{INSIDE}[second]",
        f"{REFUSED}[no-folder]",
        "m2_resume::test_resume[mid-epoch]",
    ],
    because="a folder without its manifest is no checkpoint, and the manifest comes last",
)
def renames_files_and_not_the_folder(reference):
    """Every file is written under a temporary name and renamed, the manifest last."""

    def save(root, snapshot, last, every):
        target, files = encoded(root, snapshot)
        target.mkdir(exist_ok=True)
        for name, content in files.items():
            ready = target / f"{name}.part"
            ready.write_bytes(content)
            ready.rename(target / name)
        for folder in steps(root)[:-last]:
            shutil.rmtree(folder)
        return target

    return save


@benign(
    role="save",
    accepted_by=[
        f"{OPERATIONS}[first]",
        f"{INSIDE}[second]",
        SYNCED,
        f"{REFUSED}[read-only]",
        f"{REFUSED}[largest-file]",
        f"{WRITERS}[same-step]",
        RANDOM,
    ],
    because="who waits for the thread sees no difference",
)
def saves_in_a_thread(reference):
    """The files are written by a thread that the caller waits for."""

    def save(root, snapshot, last, every):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(reference.save, root, snapshot, last, every).result()

    return save
