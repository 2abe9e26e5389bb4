"""In a store without rename a checkpoint exists when its marker does."""

import time
import uuid

import fsspec
import pytest
from checkpoint_runs import expected_of, run_of, snapshot_of

from reference.checkpoint import CheckpointError, FolderTakenError, digests
from reference.checkpoint.objects import (
    MARKER,
    ObjectFolder,
    latest_objects,
    load_objects,
    save_objects,
)
from reference.checkpoint.temporary import FOREIGN_AGE_SECONDS


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}"


def test_a_checkpoint_gives_back_what_was_saved(url):
    assert latest_objects(url) is None
    snapshot = snapshot_of(run_of(2))
    step = save_objects(url, snapshot)
    assert latest_objects(url) == step and step.endswith("/step-00000002")
    assert digests(load_objects(step, expected_of())) == digests(snapshot)


def test_a_save_that_ends_at_any_write_leaves_the_old_or_the_new(url, monkeypatch):
    first, second = snapshot_of(run_of(1)), snapshot_of(run_of(2))
    save_objects(url, first)
    real, outcomes = ObjectFolder.write, []
    for number in range(1, 7):
        written = []

        def write(self, name, pieces, written=written, number=number):
            written.append(name)
            if len(written) == number:
                real(self, name, list(pieces)[:-1])
                raise KeyboardInterrupt
            return real(self, name, pieces)

        monkeypatch.setattr(ObjectFolder, "write", write)
        with pytest.raises(KeyboardInterrupt):
            save_objects(url, second)
        outcomes.append(written[-1])
        loaded = load_objects(latest_objects(url), expected_of())
        assert digests(loaded) == digests(first)
    assert outcomes[-1] == MARKER
    monkeypatch.setattr(ObjectFolder, "write", real)
    assert latest_objects(save_objects(url, second).rpartition("/")[0]).endswith("step-00000002")


def test_a_checkpoint_is_not_overwritten(url):
    save_objects(url, snapshot_of(run_of(1)))
    with pytest.raises(FolderTakenError, match="exists already"):
        save_objects(url, snapshot_of(run_of(1)))


def test_a_writer_whose_marker_was_replaced_is_told(url, monkeypatch):
    real = ObjectFolder.write
    other = []

    def write(self, name, pieces):
        record = real(self, name, pieces)
        if name == MARKER and not other:
            other.append(self)
            self.store.rm(f"{self.path}/{MARKER}")
            save_objects(url, snapshot_of(run_of(1)))
        return record

    monkeypatch.setattr(ObjectFolder, "write", write)
    with pytest.raises(FolderTakenError, match="another writer published"):
        save_objects(url, snapshot_of(run_of(1)))
    load_objects(latest_objects(url), expected_of())


def test_a_changed_byte_is_refused(url):
    step = save_objects(url, snapshot_of(run_of(1)))
    store, path = fsspec.core.url_to_fs(step)
    (file,) = store.glob(f"{path}/*/model.safetensors")
    data = bytearray(store.cat(file))
    data[-1] ^= 1
    store.pipe(file, bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):
        load_objects(step, expected_of())


def test_older_checkpoints_and_old_attempts_go(url):
    store, root = fsspec.core.url_to_fs(url)
    young, old = int(time.time()) - 60, int(time.time() - FOREIGN_AGE_SECONDS) - 60
    for seconds in (young, old):
        attempt = f"{root}/step-00000009/{seconds:010d}-{'0' * 32}"
        store.makedirs(attempt, exist_ok=True)
        store.pipe(f"{attempt}/model.safetensors", b"x")
    for number in (1, 2, 3):
        save_objects(url, snapshot_of(run_of(number)), keep_last=2)
    names = {path.rpartition("/")[2] for path in store.ls(root, detail=False)}
    assert names == {"step-00000002", "step-00000003", "step-00000009"}
    (left,) = store.ls(f"{root}/step-00000009", detail=False)
    assert f"/{young:010d}" in left


def test_a_url_without_a_checkpoint_is_refused(url):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_objects(f"{url}/step-00000001", expected_of())
