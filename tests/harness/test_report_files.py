"""Claims about the files of a report: whole, exact, and red in CI when the run was."""

import json
import math
from xml.etree import ElementTree

import pytest
from toy_evidence import measurement, record, run_line, small, small_records, write
from toy_runs import candidates, failed_records

from harness.evidence import EvidenceError
from harness.formatting import TIMES
from harness.report import render
from harness.verify import verify


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence") / "failed"
    render(write(folder, failed_records(), run_line(candidates=candidates())))
    return folder


def test_rendering_twice_gives_the_same_bytes(tmp_path):
    folder = small(tmp_path / "run")
    render(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    render(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(before) == [
        "evidence.jsonl",
        "junit.xml",
        "report.html",
        "report.json",
        "summary.md",
    ]


def test_a_file_that_cannot_be_written_leaves_no_half_of_it(tmp_path):
    folder = small(tmp_path / "run")
    (folder / "junit.xml").mkdir()
    with pytest.raises(EvidenceError, match=r"cannot write .*junit.xml"):
        render(folder)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_new_report_does_not_cover_up_lines_cut_off(tmp_path):
    folder = small(tmp_path / "run")
    render(folder)
    lines = (folder / "evidence.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "evidence.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(EvidenceError, match=r"report.json was written from other evidence"):
        render(folder)


def test_report_json_holds_exact_values(tmp_path):
    shown = measurement("x", 0.1 + 0.2, at_most=1)
    nan = measurement("y", math.nan, at_most=1)
    made = record("m1_x::test_y", shown, nan)
    render(write(tmp_path / "run", [made]))
    text = (tmp_path / "run" / "report.json").read_text()
    told = json.loads(text, parse_constant=pytest.fail)
    assert told["records"][0]["measurements"][0]["value"] == 0.1 + 0.2
    assert told["records"][0]["measurements"][1]["value"] == {"float": "nan"}
    assert "series" not in told["records"][0]


def test_junit_counts_and_names_every_gate_run(failed):
    root = ElementTree.parse(failed / "junit.xml").getroot()
    records = failed_records()
    assert root.tag == "testsuites"
    assert [suite.attrib["name"] for suite in root] == ["run", "M0", "M1", "M2"]
    assert int(root.attrib["tests"]) == len(records) + 1
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases)
        for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.attrib[count]) == sum(case.find(tag) is not None for case in cases)
    names = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(names) == len(set(names))
    assert ("gates.m2_accumulation", "test_partition[4]") in names
    rejects = "test_partition[4] rejects fault:mean_of_microbatch_means"
    assert ("gates.m2_accumulation", rejects) in names
    missed = root.find(".//testcase[@name='test_table[stable] rejects fault:by_steps']/failure")
    assert missed.attrib["type"] == "MISSED"


@pytest.mark.parametrize(
    ("records", "allow", "tag"),
    [([], False, "failure"), ([], True, "skipped"), (None, False, None)],
)
def test_an_empty_run_is_not_green_in_junit(tmp_path, records, allow, tag):
    selection = {**run_line()["selection"], "allow_incomplete": allow}
    records = small_records() if records is None else records
    render(write(tmp_path / "run", records, run_line(selection=selection)))
    case = ElementTree.parse(tmp_path / "run" / "junit.xml").find(".//testcase[@name='verdict']")
    assert [child.tag for child in case] == ([tag] if tag else [])


def test_junit_drops_characters_that_xml_cannot_hold(tmp_path):
    made = {**record("m1_x::test_y"), "reason": "ValueError: \x00\x1b[31m \ud800 é 😀"}
    render(write(tmp_path / "run", [made]))
    error = ElementTree.parse(tmp_path / "run" / "junit.xml").find(".//error")
    assert error.attrib["message"].endswith("é 😀")


def test_the_summary_tells_verdict_ladder_failures_and_what_was_not_run(failed):
    text = (failed / "summary.md").read_text()
    assert text.startswith("# FAILED\n")
    assert "| M1 | failed | 7 of 8 gates, 7 of 8 faults caught, 2 of 3 benign accepted |" in text
    assert f"3,200 {TIMES} the bound" in text
    assert "- 1: This CPU has no bfloat16 matrix products." in text
    assert verify(failed) == []
