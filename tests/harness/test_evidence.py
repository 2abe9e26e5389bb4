"""Claims about the evidence: what is written stays, whole line by whole line."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_evidence import small

from harness.chain import canonical, decode
from harness.evidence import EvidenceError, EvidenceWriter, read
from harness.verify import verify


def test_what_is_written_is_read_back(tmp_path):
    record = {"kind": "gate", "value": 0.1 + 0.2, "count": 10**30, "name": "Größe \u2028 \ud800"}
    with EvidenceWriter(tmp_path / "deep" / "run") as writer:
        writer.append(record)
    (found,) = read(tmp_path / "deep" / "run")
    assert {key: found[key] for key in record} == record
    assert found["previous"] == "0" * 64
    assert writer.num_lines == 1
    assert writer.head == found["hash"]


def test_no_token_that_json_does_not_know(tmp_path):
    with EvidenceWriter(tmp_path / "run") as writer:
        writer.append({"kind": "gate", "values": [math.nan, math.inf, -math.inf]})
    text = (tmp_path / "run" / "evidence.jsonl").read_text()
    json.loads(text, parse_constant=pytest.fail)
    assert '[{"float":"nan"},{"float":"inf"},{"float":"-inf"}]' in text
    nan, plus, minus = read(tmp_path / "run")[0]["values"]
    assert math.isnan(nan)
    assert (plus, minus) == (math.inf, -math.inf)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3))
@settings(max_examples=60)
def test_canonical_json_survives_a_round_trip(value):
    line = canonical(value).encode()
    assert b"\n" not in line
    assert canonical(decode(line)).encode() == line


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"a": {1, 2}}, {"a": b"x"}])
def test_what_is_no_json_is_refused_and_nothing_written(tmp_path, value):
    with EvidenceWriter(tmp_path / "run") as writer:
        with pytest.raises(ValueError, match="record"):
            writer.append({"kind": "gate", "value": value})
        writer.append({"kind": "end"})
    assert len(read(tmp_path / "run")) == 1


@pytest.mark.parametrize("name", ["index", "previous", "hash"])
def test_a_record_may_not_take_the_chains_own_names(tmp_path, name):
    with (
        EvidenceWriter(tmp_path / "run") as writer,
        pytest.raises(ValueError, match=f"may not hold .*{name}"),
    ):
        writer.append({"kind": "gate", name: 1})


def test_a_record_has_a_kind(tmp_path):
    with (
        EvidenceWriter(tmp_path / "run") as writer,
        pytest.raises(ValueError, match="has a kind"),
    ):
        writer.append({"gate": "x"})


def test_evidence_is_never_written_over(tmp_path):
    small(tmp_path / "run")
    before = (tmp_path / "run" / "evidence.jsonl").read_bytes()
    with pytest.raises(EvidenceError, match="already holds the evidence of a run"):
        EvidenceWriter(tmp_path / "run")
    assert (tmp_path / "run" / "evidence.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EvidenceError, match="cannot write evidence to"):
        EvidenceWriter(tmp_path / "file")
    with pytest.raises(EvidenceError, match=r"cannot write evidence to .*Not a directory"):
        EvidenceWriter(tmp_path / "file" / "run")


def test_a_folder_without_permission_is_a_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # root may write everywhere: be nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(EvidenceError, match=r"cannot write evidence to .*Permission denied"):
            EvidenceWriter(tmp_path / "run")
    finally:
        os.seteuid(user)


def test_a_closed_writer_says_so(tmp_path):
    writer = EvidenceWriter(tmp_path / "run")
    writer.append({"kind": "run"})
    writer.close()
    writer.close()
    with pytest.raises(EvidenceError, match="is closed"):
        writer.append({"kind": "end"})


FULL_DISK = """
import resource, sys
from harness.evidence import EvidenceError, EvidenceWriter

writer = EvidenceWriter(sys.argv[1])
writer.append({"kind": "run"})
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))  # the disk is full
try:
    writer.append({"kind": "gate", "text": "x" * 1000})
except EvidenceError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append({"kind": "end"})  # room again
writer.close()
"""


def test_a_full_disk_leaves_whole_lines_only(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "run"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert "cannot write to" in done.stdout
    assert "File too large" in done.stdout
    assert [record["kind"] for record in read(tmp_path / "run")] == ["run", "end"]


INTERRUPTED = """
import signal, sys
from harness.evidence import EvidenceWriter

writer = EvidenceWriter(sys.argv[1])
print("ready", flush=True)
try:
    while True:
        writer.append({"kind": "gate", "text": "x" * 5000})
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer.append({"kind": "end", "interrupted": True})
    writer.close()
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 11])
def test_an_interrupt_in_the_middle_of_a_line_leaves_whole_lines(tmp_path, delay_ms):
    command = [sys.executable, "-c", INTERRUPTED, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(delay_ms / 1000)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()  # or it would write until the disk is full
    records = read(tmp_path / "run")
    assert records[-1]["interrupted"] is True
    assert [record["index"] for record in records] == list(range(len(records)))


@pytest.mark.parametrize("content", [None, b""])
def test_no_evidence_is_a_clear_error(tmp_path, content):
    if content is not None:
        (tmp_path / "evidence.jsonl").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"holds no evidence.jsonl|is empty"):
        read(tmp_path)
    with pytest.raises(EvidenceError, match=r"holds no evidence.jsonl|is empty"):
        verify(tmp_path)
