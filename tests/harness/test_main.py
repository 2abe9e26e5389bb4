"""Claims about ``python -m harness``."""

import json
import subprocess
import sys

import pytest
from toy_evidence import small, write
from toy_runs import failed_records

from harness.__main__ import main
from harness.false_alarms import false_alarms
from harness.report import render


@pytest.fixture
def folder(tmp_path):
    render(small(tmp_path / "run"))
    return tmp_path / "run"


def test_report_renders_again_from_the_evidence_alone(folder, capsys):
    page = folder / "report.html"
    before = page.read_bytes()
    for name in ("report.html", "report.json", "summary.md", "junit.xml"):
        (folder / name).unlink()
    assert main(["report", str(folder)]) == 0
    assert page.read_bytes() == before
    assert capsys.readouterr().out == f"PASSED, as recorded. Rendered: {page}\n"


def test_report_judges_nothing_anew(tmp_path, capsys):
    folder = write(tmp_path / "run", failed_records())
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("FAILED, as recorded.")


def test_verify_says_that_sound_evidence_is_sound(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("Sound: 8 lines, verdict PASSED, last hash ")


def test_verify_names_every_problem_on_a_line(folder, capsys):
    (folder / "report.html").write_text("")
    (folder / "junit.xml").unlink()
    assert main(["verify", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "junit.xml cannot be read: No such file or directory.",
        "report.html was changed after it was rendered.",
    ]


@pytest.mark.parametrize("command", ["report", "verify"])
def test_a_missing_folder_is_a_clear_error(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "nowhere holds no evidence.jsonl; name a run's folder" in told.err


def test_report_refuses_a_broken_chain(folder, capsys):
    path = folder / "evidence.jsonl"
    path.write_bytes(path.read_bytes().replace(b"mean_of_means", b"mean_of_meanz"))
    before = (folder / "report.html").read_bytes()
    assert main(["report", str(folder)]) == 2
    assert "cannot be trusted. Line 5 was changed" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == before


@pytest.mark.parametrize(
    "arguments", [[], ["unknown"], ["report"], ["verify", "a", "b"], ["report", "a", "-n", "2"]]
)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m harness" in capsys.readouterr().err


def test_it_runs_as_a_module(folder):
    command = [sys.executable, "-m", "harness", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- false alarms ----------------------------------------------------------------------------

GATE = """
import pytest
from harness import benign, gate, not_run

@gate(claim="double doubles", roles=["double"], not_claimed="the rest", source="arithmetic")
@pytest.mark.parametrize("x", [1, 3])
def test_double(stack, x, rng, check):
    import torch
    noise = torch.rand((), generator=rng).item()
    CONDITION
    check("error", abs(stack.double(x) - 2 * x) + noise, at_most=BOUND, because="noise below 1")
"""
FAULTS = """
from harness import benign, fault

@fault(role="double", caught_by="m0_x::test_double", seen_in="own")
def triple(reference):
    '''Triples.'''
    return lambda x: 3 * x

@benign(role="double", accepted_by="m0_x::test_double", because="addition is the same")
def twice(reference):
    '''Adds.'''
    return lambda x: x + x
"""


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """Writes a project with one gate, and makes it the current folder."""

    def put(bound=1.0, condition="pass"):
        (tmp_path / "faults").mkdir()
        (tmp_path / "faults" / "__init__.py").touch()
        (tmp_path / "faults" / "some.py").write_text(FAULTS)
        gate = GATE.replace("BOUND", str(bound)).replace("CONDITION", condition)
        (tmp_path / "m0_x.py").write_text(gate)
        reference = "def double(x):\n    return 2 * x\n\nROLES = {'double': double}\n"
        (tmp_path / "toy_reference.py").write_text(reference)
        (tmp_path / "pytest.ini").write_text("[pytest]\ntouchstone_reference = toy_reference\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        return tmp_path

    return put


def test_no_false_alarm_over_seeds(gates, capsys):
    folder = gates()
    assert false_alarms(2, ["-p", "no:cacheprovider", "m0_x.py"]) == 0
    told = capsys.readouterr().out
    assert "no false alarm in 8 gate runs over 2 seeds" in told
    assert list((folder / "temporary").iterdir()) == []
    assert told.count("4/4") == 2
    assert "twice" in told
    assert "triple" not in told


def test_any_false_alarm_exits_1_and_keeps_the_evidence(gates, capsys):
    folder = gates(bound=1e-9)
    assert false_alarms(1, ["-p", "no:cacheprovider", "m0_x.py"]) == 1
    assert "the evidence is kept in" in capsys.readouterr().out
    (kept,) = (folder / "temporary").glob("*/seed-0/report.json")
    assert json.loads(kept.read_text())["verdict"] == "FAILED"


def test_what_did_not_run_is_no_success(gates, capsys):
    gates(condition="x == 3 and not_run('No such machine.')")
    assert false_alarms(1, ["-p", "no:cacheprovider", "m0_x.py"]) == 6
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_seed_whose_gates_cannot_be_collected_says_why(gates, capsys):
    folder = gates()
    (folder / "m0_x.py").write_text("import no_such_module\n")
    assert main(["false-alarms", "--seeds", "1", "-p", "no:cacheprovider", "m0_x.py"]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_a_seed_without_evidence_is_a_clear_error(gates, capsys):
    gates()
    assert main(["false-alarms", "--seeds", "1", "--no-such-option"]) == 2
    told = capsys.readouterr().err
    assert "seed 0 left no evidence" in told
    assert "--no-such-option" in told


@pytest.mark.parametrize("option", ["--seed=3", "--no-faults", "--evidence"])
def test_options_that_it_sets_itself_are_refused(capsys, option):
    assert main(["false-alarms", option]) == 2
    assert "is set for every seed" in capsys.readouterr().err


def test_no_seed_is_refused(capsys):
    assert main(["false-alarms", "--seeds", "0"]) == 2
    assert "give at least 1" in capsys.readouterr().err
