"""Claims about ``verify``: what was touched is named, and no verdict is taken on trust."""

import json
import math
import shutil
from pathlib import Path

import pytest
from toy_evidence import run_line, small, small_records, write

from harness.chain import canonical, decode, encode, seal
from harness.evidence import EvidenceError, read
from harness.report import render
from harness.verify import verify


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Sound evidence, rendered."""
    return render(small(tmp_path_factory.mktemp("evidence") / "run")).parent


@pytest.fixture
def folder(original, tmp_path):
    """A copy to tamper with."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def lines_of(folder):
    return (folder / "evidence.jsonl").read_bytes().splitlines(keepends=True)


def put(folder, lines):
    (folder / "evidence.jsonl").write_bytes(b"".join(lines))


def rehash(lines):
    """The lines as a careful forger leaves them: a sound chain over other content."""
    previous, forged = "0" * 64, []
    for index, line in enumerate(lines):
        body = {k: v for k, v in decode(line).items() if k not in ("index", "previous", "hash")}
        sealed = seal(body, index, previous)
        previous = sealed["hash"]
        forged.append(canonical(sealed).encode() + b"\n")
    return forged


def edit(line, change):
    body = decode(line)
    change(body)
    return canonical(body).encode() + b"\n"


def test_sound_evidence_has_no_problem(folder):
    assert verify(folder) == []


def test_rendering_again_keeps_it_sound(folder):
    before = (folder / "evidence.jsonl").read_bytes()
    render(folder)
    assert verify(folder) == []
    assert (folder / "evidence.jsonl").read_bytes() == before


def test_every_single_changed_byte_is_refused(folder):
    """Each byte of a line and its end, changed by one bit, is found, and its line named."""
    lines = lines_of(folder)
    number = min(range(len(lines)), key=lambda place: len(lines[place]))
    for place in range(len(lines[number])):
        changed = bytearray(lines[number])
        changed[place] ^= 1
        put(folder, [*lines[:number], bytes(changed), *lines[number + 1 :]])
        (problem,) = verify(folder)
        assert f"Line {number + 1} was changed" in problem
        with pytest.raises(EvidenceError, match=f"Line {number + 1} was"):
            read(folder)


@pytest.mark.parametrize("number", range(7))
def test_the_first_removed_line_is_named(folder, number):
    lines = lines_of(folder)
    put(folder, lines[:number] + lines[number + 1 :])
    assert f"Line {number + 1} was removed" in verify(folder)[0]


def test_a_removed_end_is_named_though_the_chain_is_sound(folder):
    put(folder, lines_of(folder)[:-1])
    problems = verify(folder)
    assert "The run has no end" in problems[0]
    assert "Line 8 was removed: report.json knows 8 lines, there are 7." in problems[1]


def test_a_line_cut_short_is_named(folder):
    lines = lines_of(folder)
    put(folder, [*lines[:-1], lines[-1][:-5]])
    assert verify(folder) == ["evidence.jsonl: Line 8 was changed: it is cut short."]


@pytest.mark.parametrize("number", range(1, 7))
def test_the_first_reordered_line_is_named(folder, number):
    lines = lines_of(folder)
    lines[number], lines[number - 1] = lines[number - 1], lines[number]
    put(folder, lines)
    assert (
        f"Lines were reordered: line {number} was written as line {number + 1}"
        in (verify(folder)[0])
    )


def test_an_added_copy_is_named(folder):
    lines = lines_of(folder)
    put(folder, [*lines[:4], lines[2], *lines[4:]])
    assert "Line 5 was added: it is a copy of line 3." in verify(folder)[0]


def test_an_added_line_without_its_hash_is_named(folder):
    lines = lines_of(folder)
    added = edit(lines[3], lambda body: body.update(case="7"))
    put(folder, [*lines[:3], added, *lines[3:]])
    assert "Line 4 was added" in verify(folder)[0]


def test_an_added_line_with_a_right_hash_is_named(folder):
    lines = lines_of(folder)
    before = decode(lines[2])
    added = canonical(seal({"kind": "gate"}, 3, before["hash"])).encode() + b"\n"
    put(folder, [*lines[:3], added, *lines[3:]])
    assert "Line 4 was added: line 5 was written as line 4." in verify(folder)[0]


def test_a_line_changed_and_hashed_again_is_named(folder):
    lines = lines_of(folder)
    body = {k: v for k, v in decode(lines[3]).items() if k not in ("index", "previous", "hash")}
    body["duration_s"] = 0.0
    forged = canonical(seal(body, 3, decode(lines[2])["hash"])).encode() + b"\n"
    put(folder, [*lines[:3], forged, *lines[4:]])
    assert "Line 4 was changed and hashed again" in verify(folder)[0]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{}\n", b"[]\n", b"nonsense\n", b"\xff\n", b"[" * 100_000 + b"\n", b'{"index":-9}\n'],
)
def test_garbage_is_named_and_never_crashes(folder, line):
    lines = lines_of(folder)
    put(folder, [*lines[:3], line, *lines[4:]])
    assert "Line 4 was changed" in verify(folder)[0]


def test_a_line_written_in_another_form_is_named(folder):
    lines = lines_of(folder)
    spaced = json.dumps(json.loads(lines[3])).encode() + b"\n"
    put(folder, [*lines[:3], spaced, *lines[4:]])
    assert "Line 4 was changed: it is not in the form" in verify(folder)[0]


def test_a_chain_hashed_anew_does_not_match_the_report(folder):
    lines = lines_of(folder)
    lines[2] = edit(lines[2], lambda body: body.update(claim="Another claim."))
    put(folder, rehash(lines))
    assert verify(folder) == [
        "The last line is not the one whose hash report.json holds: lines were hashed again."
    ]


def test_a_missing_report_json_is_a_problem(folder):
    (folder / "report.json").unlink()
    assert "report.json is missing" in verify(folder)[0]


def forged(tmp_path, change, place=2):
    """Evidence with one record changed before it was hashed, rendered as if it were true."""
    folder = small(tmp_path / "run")
    lines = lines_of(folder)
    lines[place] = edit(lines[place], change)
    put(folder, rehash(lines))
    render(folder)
    return verify(folder)


def test_a_measurement_that_does_not_keep_to_its_bound_is_found(tmp_path):
    problems = forged(tmp_path, lambda body: body["measurements"][0].update(value=1.0))
    assert "Line 3, m2_accumulation::test_partition[2]" in problems[0]
    assert "recorded as passed" in problems[0]
    assert any("the margin" in problem for problem in problems)


def test_a_bound_that_was_widened_is_found_by_its_margin(tmp_path):
    problems = forged(tmp_path, lambda body: body["measurements"][0].update(bound={"at_most": 0.5}))
    assert len(problems) == 1
    assert "the margin of 'relative gradient error'" in problems[0]


@pytest.mark.parametrize("verdict", ["PASS", "NOT_RUN"])
def test_a_failed_gate_recorded_as_something_else_is_found(tmp_path, verdict):
    def forge(body):
        body["measurements"][0].update(value=1.0, passed=False, margin=1 - 1.0 / 1e-12)
        body.update(verdict=verdict, reason="because")

    problems = forged(tmp_path, forge)
    assert f"the verdict {verdict} is recorded, but the measurements give FAIL" in problems[0]


def test_a_pass_without_measurements_is_found(tmp_path):
    problems = forged(tmp_path, lambda body: body.update(measurements=[]))
    assert "the verdict PASS is recorded, but the measurements give ERROR" in problems[0]


def test_not_run_without_a_reason_is_found(tmp_path):
    problems = forged(
        tmp_path, lambda body: body.update(measurements=[], verdict="NOT_RUN", reason="")
    )
    assert "NOT_RUN has no reason" in problems[0]


def test_a_run_recorded_as_better_than_its_records_is_found(tmp_path):
    def forge(body):
        body["measurements"][0].update(value=1.0, passed=False, margin=1 - 1.0 / 1e-12)
        body.update(verdict="FAIL", reason="too large")

    assert forged(tmp_path, forge) == [
        "The run is recorded as PASSED, but the records give FAILED."
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"verdict": "FAILED"}, "recorded as FAILED, but the records give PASSED"),
        ({"interrupted": True}, "recorded as PASSED, but the records give INCOMPLETE"),
        ({"errors": ["m1_x.py broke."]}, "recorded as PASSED, but the records give FAILED"),
        ({"problems": ["nothing"]}, "problems recorded at the end"),
        ({"exit_status": 6}, "exit status 6 does not go with the verdict PASSED"),
    ],
)
def test_an_end_that_does_not_follow_is_found(tmp_path, change, sentence):
    assert sentence in forged(tmp_path, lambda body: body.update(change), place=7)[0]


def test_fewer_records_than_selected_is_found(tmp_path):
    problems = forged(tmp_path, lambda body: body.update(selected=9), place=6)
    assert problems == ["The run is recorded as PASSED, but the records give INCOMPLETE."]


@pytest.mark.parametrize(
    ("place", "change"),
    [(2, {"measurements": 3}), (2, {"verdict": 5}), (7, {"interrupted": None, "problems": 1})],
)
def test_records_of_another_shape_are_a_problem_not_a_crash(tmp_path, place, change):
    folder = small(tmp_path / "run")
    render(folder)
    lines = lines_of(folder)
    lines[place] = edit(lines[place], lambda body: body.update(change))
    put(folder, rehash(lines))
    assert verify(folder)


@pytest.mark.parametrize("name", ["report.html", "summary.md", "junit.xml"])
def test_a_changed_report_is_found(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert verify(folder) == [f"{name} was changed after it was rendered."]
    path.unlink()
    assert f"{name} cannot be read" in verify(folder)[0]


def test_a_report_json_that_says_something_else_is_found(folder):
    path = folder / "report.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "verdict": "FAILED"}))
    assert verify(folder) == [
        "report.json does not say what the evidence says, first in 'verdict'."
    ]


def test_not_a_number_survives_all_of_it(tmp_path):
    records = small_records()
    broken = encode(records[1]["measurements"][0])
    broken.update(value=math.nan, passed=False, margin=None)
    records[1].update(measurements=[broken], verdict="FAIL", reason="measured nan")
    render(write(tmp_path / "run", records, run_line()))
    assert verify(tmp_path / "run") == []
