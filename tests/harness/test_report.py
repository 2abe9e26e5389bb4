"""Claims about the report: all of the evidence, nothing from outside, and never a false calm."""

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from toy_evidence import (
    candidates,
    failed_records,
    large_records,
    measurement,
    not_run,
    record,
    run_line,
    simulated_records,
    small,
    small_records,
    variant,
    write,
)

from harness.chain import decode
from harness.evidence import EvidenceError, EvidenceWriter, read
from harness.formatting import TIMES, duration, measured, number, share
from harness.plots import MAX_POINTS, figure_svg, thin
from harness.report import render
from harness.verify import verify

VOID = {"meta", "link", "br", "col", "use", "path", "circle", "rect", "polygon", "line"}


class Parsed(HTMLParser):
    """What a page refers to, its ids, its words, and whether its tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.references, self.ids, self.words, self.open_tags = [], [], [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.ids += [known["id"]] if "id" in known else []
        names = ("src", "href", "xlink:href", "data", "action", "srcset", "poster")
        self.references += [known[name] for name in names if name in known]
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if self.open_tags and self.open_tags[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(folder):
    return Parsed((folder / "report.html").read_text())


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence") / "failed"
    render(write(folder, failed_records(), run_line(candidates=candidates())))
    return folder


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence") / "simulated"
    device = {"kind": "npu", "name": "fake-acl", "missing": "", "simulated": True}
    render(write(folder, simulated_records(), run_line(device=device)))
    return folder


# --- the page --------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_it(failed):
    text = (failed / "report.html").read_text()
    page = Parsed(text)
    assert page.open_tags == []
    assert len(page.ids) == len(set(page.ids))
    inside = {f"#{name}" for name in page.ids} | {"data:,"}
    assert {address for address in page.references if address not in inside} == set()
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= inside
    assert "@import" not in text
    assert "//" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text).replace("://", "")


def test_the_page_holds_every_part_of_the_evidence(failed):
    text = page_of(failed).text
    for made in failed_records():
        assert made["claim"] in text
        assert made["source"] in text
        assert made["not_claimed"] in text
        for measured_ in made["measurements"]:
            assert measured_["name"] in text
            if made["kind"] == "gate":
                assert measured_["because"] in text
        told = made.get("variant", {})
        assert told.get("name", "") in text
        assert told.get("summary", "") in text
    for entry in candidates():
        assert entry["sha256"] in text
    for words in ("2.13.0+cpu", "0f3c9a5d2b7e", "cuda.matmul.allow_tf32", "Example CPU", "L0, 0"):
        assert words in text
    assert read(failed)[-1]["hash"] in text


def test_the_verdict_stands_first_in_one_sentence(failed):
    text = page_of(failed).text
    assert text.index("FAILED") < 100
    assert (
        "The candidate fastops.kernels (accumulate, attention and rms_norm) on cpu (Example CPU @ "
        "2.4 GHz) does not keep the contracts of M0, M1 and M2: 2 gate runs failed, 1 gate run "
        "ended in an error, 1 fault was missed, 1 variant crashed and 1 benign variant was "
        "rejected. 20 of 22 planted faults caught, 4 of 5 benign variants accepted."
    ) in text


def test_a_milestone_that_was_not_selected_is_not_asked(failed):
    ladder = re.findall(r"(M\d) (passed|failed|incomplete|not asked)", page_of(failed).text)
    states = dict(reversed(ladder))
    assert states == {
        "M0": "passed",
        "M1": "failed",
        "M2": "failed",
        "M3": "not asked",
        "M4": "not asked",
        "M5": "not asked",
        "M6": "not asked",
    }


def test_a_milestone_that_was_asked_for_and_is_empty_is_incomplete(tmp_path):
    selection = {**run_line()["selection"], "expression": "M0 or M2 or M5"}
    render(small(tmp_path / "run", run=run_line(selection=selection)))
    told = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told["milestones"]["M5"] == "incomplete"
    assert told["milestones"]["M1"] == "not asked"


def test_a_milestone_of_which_a_record_is_missing_is_incomplete(tmp_path):
    folder = tmp_path / "run"
    with EvidenceWriter(folder) as writer:
        writer.append(run_line())
        writer.append(small_records()[0])
        writer.append({"kind": "selection", "selected": 2, "milestones": {"M0": 2}})
    render(folder)
    told = json.loads((folder / "report.json").read_text())
    assert told["milestones"]["M0"] == "incomplete"


def test_a_simulated_device_is_named_in_every_line(simulated):
    html = (simulated / "report.html").read_text()
    rows = re.findall(r"<tr[ >].*?</tr>", html, re.S)
    rows = [row for row in rows if "<td" in row and 'class="rows' not in row]
    measured_rows = [row for row in rows if 'class="margin"' in row]
    assert measured_rows
    assert all("simulated" in row for row in measured_rows)
    gates = re.findall(r'<details class="gate".*?</summary>', html, re.S)
    assert gates
    assert all("simulated" in gate for gate in gates)
    assert "closes no hardware milestone" in html
    cases = ElementTree.parse(simulated / "junit.xml").getroot().findall("testsuite[@name='M1']/*")
    names = [case.attrib["name"] for case in cases if case.tag == "testcase"]
    assert names
    assert all(name.endswith("(simulated)") for name in names)
    told = json.loads((simulated / "report.json").read_text())
    assert all(made["device"]["simulated"] for made in told["records"])
    assert "SIMULATED" in (simulated / "summary.md").read_text().splitlines()[2]


def test_what_the_user_wrote_is_never_markup(tmp_path):
    evil = '<script>alert("1")</script><img src=x onerror=y> & $x^2$ {{ 7*7 }}'
    series = {"name": evil, "x": [1, 2], "y": [1, 2], "x_label": evil, "y_label": evil}
    shown = measurement(evil, evil, equal=evil, because=evil, unit=evil)
    made = record("m1_x::test_y", shown, case=evil, claim=evil, source=evil, series=[series])
    fault = variant("fault", evil, evil, evil, evil, "m1_x::test_y", shown)
    folder = write(tmp_path / "run", [made, fault], run_line(rung=evil, flags={evil: evil}))
    render(folder)
    text = (folder / "report.html").read_text()
    assert text.count("<script>") == 1
    assert "<img" not in text
    assert "7*7" in Parsed(text).text
    ElementTree.parse(folder / "junit.xml")
    assert "<script>" not in (folder / "summary.md").read_text().replace("\\<", "")


def test_allow_incomplete_and_no_faults_are_told_at_the_top(tmp_path):
    selection = {**run_line()["selection"], "allow_incomplete": True, "no_faults": True}
    records = [made for made in small_records() if made["kind"] == "gate"]
    records[0] = not_run(records[0], "No GPU.")
    render(write(tmp_path / "run", records, run_line(selection=selection)))
    text = page_of(tmp_path / "run").text
    assert text.index("--allow-incomplete") < text.index("Milestones")
    assert text.index("--no-faults") < text.index("Milestones")
    assert "The claim is not shown: 1 of 3 gate runs of M0, M1 and M2 did not run" in text
    assert "No fault was planted in this run." in text


def test_a_run_that_was_killed_is_incomplete(tmp_path):
    folder = tmp_path / "run"
    with EvidenceWriter(folder) as writer:
        writer.append(run_line())
        writer.append(small_records()[0])
    render(folder)
    text = page_of(folder).text
    assert text.index("INCOMPLETE") < 100
    assert "The run has no end: it was killed, or the disk was full." in text


def test_a_run_that_never_began_can_be_read(tmp_path):
    with EvidenceWriter(tmp_path / "run") as writer:
        writer.append({"kind": "run"})
    render(tmp_path / "run")
    assert "The claim is not shown: nothing ran" in page_of(tmp_path / "run").text


def test_not_a_number_is_shown_as_not_met(failed):
    html = (failed / "report.html").read_text()
    row = re.search(r"<tr id=\"benign-masked-by-minimum.*?</tr>", html, re.S)[0]
    assert "NaN" in row
    assert "not met" in row
    assert "FALSE ALARM" in row


def test_a_missed_fault_shows_the_case_that_missed_it(failed):
    html = (failed / "report.html").read_text()
    row = Parsed(re.search(r"<tr id=\"fault-by-steps.*?</tr>", html, re.S)[0]).text
    assert row.startswith("MISSED")
    assert "missed in stable , 1 of 3 cases" in row
    assert "2e-16" in row


# --- files -----------------------------------------------------------------------------------


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


# --- numbers and curves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7615616512, "7,615,616,512"),
        (20.0, "20"),
        (0.123456, "0.1235"),
        (12345.678, "12,346"),
        (1234567.0, "1.235e6"),
        (3.2e-15, "3.2e-15"),
        (-2.5, "-2.5"),
        (math.nan, "NaN"),
        (-math.inf, "-infinity"),
        (True, "true"),
    ],
)
def test_numbers_are_short_and_integers_exact(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "bound", "texts"),
    [
        (0.02000001, {"at_most": 0.02}, ("0.02000001", "≤ 0.02")),
        (0.02, {"at_most": 0.02}, ("0.02", "≤ 0.02")),
        (1 + 2**-52, {"within": [1 - 1e-12, 1 + 1e-12]}, ("1 + 2.22e-16", "in 1 ± 1e-12")),
        (0.985, {"within": [1 - 1e-12, 1 + 1e-12]}, ("0.985", "in 1 ± 1e-12")),
        (0.4, {"within": [0.1, 0.9]}, ("0.4", "in 0.1 … 0.9")),
        (math.nan, {"within": [1 - 1e-12, 1 + 1e-12]}, ("NaN", "in 1 ± 1e-12")),
        ([1, 2], {"equal": [1, 3]}, ("[1, 2]", "= [1, 3]")),
        (
            list(range(100)),
            {"equal": [*range(50), 0, *range(51, 100)]},
            ("entry 50: 50", "= entry 50: 0"),
        ),
        ("a", {"equal": "b"}, ("a", "= b")),
    ],
)
def test_a_value_never_looks_like_a_bound_it_is_not(value, bound, texts):
    assert measured(value, bound) == texts


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (None, "exact"),
        (1.0, "> 99 % left"),
        (0.5, "50 % left"),
        (0.031, "3.1 % left"),
        (0.0, "at the bound"),
        (1e-9, "< 0.1 % left"),
        (-0.01, "just past the bound"),
        (-2.0, f"3 {TIMES} the bound"),
    ],
)
def test_a_margin_in_words(margin, text):
    assert share(margin) == text


def test_durations():
    assert [duration(s) for s in (0.0123, 7.53, 61, 4000)] == [
        "0.012 s",
        "7.5 s",
        "1 min 01 s",
        "1 h 06 min",
    ]


@pytest.mark.parametrize("place", [0, 1, 4999, 5000, 9998, 9999])
def test_thinning_keeps_every_peak(place):
    y = [1.0] * 10_000
    y[place] = 50.0
    x, thinned = thin(list(range(10_000)), y)
    assert len(x) <= MAX_POINTS
    assert (place, 50.0) in zip(x, thinned, strict=True)
    assert x == sorted(x)


@pytest.mark.parametrize("y", [[math.nan] * 3, [math.inf, 1.0, -math.inf], [1e-9, 1.0, 1e9], [5.0]])
def test_any_curve_can_be_drawn(y):
    x = list(range(len(y)))
    svg = figure_svg([{"name": "_c", "x": x, "y": y, "x_label": "x", "y_label": "y"}], "p")
    root = ElementTree.fromstring(svg.replace("xlink:", ""))
    assert root.attrib["role"] == "img"


def test_points_that_cannot_be_drawn_are_counted(tmp_path):
    render(small(tmp_path / "run"))
    assert "1 point not finite, not drawn" in page_of(tmp_path / "run").text


def test_a_line_of_the_evidence_is_plain_json(tmp_path):
    folder = write(tmp_path / "run", large_records())
    for line in (folder / "evidence.jsonl").read_bytes().splitlines():
        assert decode(line)["hash"] == json.loads(line)["hash"]
