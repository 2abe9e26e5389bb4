"""Hundreds of generated corruptions: always refused, with less than 64 MiB of memory."""

import hashlib
import resource
import shutil
import tracemalloc

import pytest
from checkpoint_runs import FILES, expected_of, fresh, hashed_again, rewritten, run_of, snapshot_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.checkpoint import CheckpointError, load, save
from reference.checkpoint.state import require_restorable

MIB = 2**20
JSON_PIECES = [
    b"[" * 5000,
    b'{"a":' * 500,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b'"\\ud800"',
    b"\xff",
    b" ",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), snapshot_of(run_of(2)))


@st.composite
def corruptions(draw):
    """(file, what becomes of its bytes), of which none leaves them as they were."""
    name = draw(st.sampled_from(FILES))
    place = draw(st.floats(0, 1, exclude_max=True))
    kind = draw(st.sampled_from(["flip", "cut", "grow", "swap", "length", "insert", "replace"]))
    byte = draw(st.integers(1, 255))
    text = draw(st.sampled_from(JSON_PIECES))
    other = draw(st.sampled_from([file for file in FILES if file != name]))

    def damaged(folder):
        data = bytearray((folder / name).read_bytes())
        at = int(place * len(data))
        if kind == "flip":
            data[at] ^= byte
        elif kind == "cut":
            del data[at:]
        elif kind == "grow":
            data += bytes([byte]) * (1 + at)
        elif kind == "swap":
            data = (folder / other).read_bytes()
        elif kind == "length":
            data[:8] = (2 ** (byte % 64) + at).to_bytes(8, "little")
        elif kind == "insert":
            data[at:at] = text
        else:
            data[at : at + len(text)] = text
        return bytes(data)

    return name, kind, damaged


def examined(folder, where):
    """Loading `folder` raises CheckpointError and needs less than 64 MiB."""
    resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(folder, expected_of())
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB, where
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident_kib < 64 * 1024, where


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(corruption=corruptions())
def test_no_generated_corruption_is_loaded(saved, tmp_path_factory, corruption):
    name, kind, damaged = corruption
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("damaged") / "copy")
    data = damaged(folder)
    if data == (folder / name).read_bytes():
        return
    (folder / name).write_bytes(data)
    examined(folder, (name, kind))
    shutil.rmtree(folder.parent)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(corruption=corruptions())
def test_a_corruption_that_the_manifest_agrees_with_is_refused_or_fits(
    saved, tmp_path_factory, corruption
):
    """Headers and JSON are parsed then, which the hashes would have kept away. With another value,
    or another space, it is a checkpoint of its own: then it fits the run that asked for it.
    """
    name, kind, damaged = corruption
    if name == "manifest.json":
        return
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("damaged") / "copy")
    data = damaged(folder)
    (folder / name).write_bytes(data)
    hashed_again(folder, name)
    digest = hashlib.sha256(data).hexdigest()
    parts = {FILES[2]: "parameters", FILES[3]: "optimizer", FILES[4]: "random"}
    if name in parts:
        rewritten(folder, lambda content: content["parts"].update({parts[name]: digest}))
    try:
        snapshot = load(folder, expected_of())
    except CheckpointError:
        pass
    else:
        assert kind in ("flip", "replace", "insert", "cut"), (name, kind)
        require_restorable(snapshot, fresh())
    shutil.rmtree(folder.parent)
