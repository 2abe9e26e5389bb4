"""Claims about the report: all of the evidence, nothing from outside, and never a false calm."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from toy_evidence import (
    measurement,
    not_run,
    record,
    run_line,
    small,
    small_records,
    variant,
    write,
)
from toy_runs import candidates, failed_records, simulated_records

from harness.evidence import EvidenceWriter, read
from harness.report import render

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


def test_points_that_cannot_be_drawn_are_counted(tmp_path):
    render(small(tmp_path / "run"))
    assert "1 point not finite, not drawn" in page_of(tmp_path / "run").text
