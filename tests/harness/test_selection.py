"""What is not run can never look like a pass: selection, interruption, other tests."""

import pytest

GATES = """
@gate(claim="right", **about)
def test_right(stack, check):
    check("value", stack.double(1), equal=2, because="it is arithmetic")

@gate(claim="as the flag says", **about)
def test_flag(stack, check):
    import pathlib
    check("mended", pathlib.Path("mended").exists(), equal=True, because="the flag is there")
"""
PROCESSES = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "xdist"])


@pytest.fixture
def flagged(toy):
    toy.gates(GATES)
    return toy


@PROCESSES
def test_a_keyword_selects_a_part_and_the_run_says_so(flagged, workers):
    result = flagged.run("m1_toy.py", "-k", "right", *workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["PASSED*1 of 2 collected*"])
    (selection,) = flagged.evidence("selection")
    assert (selection["selected"], selection["collected"]) == (1, {"M1": 2})
    assert selection["in_part"] == ["M1"]
    assert "passed in part" in (flagged.folder / "summary.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "in_part"),
    [
        (["m1_toy.py", "m1_more.py"], []),
        (["-m", "M1", "."], []),
        (["m1_toy.py"], ["M1"]),
        (["m1_toy.py::test_right", "m1_more.py"], ["M1"]),
    ],
)
def test_a_part_of_a_milestone_is_not_called_the_milestone(flagged, arguments, in_part):
    (flagged.path / "mended").touch()
    flagged.gates(GATES, "m1_more")
    assert flagged.run(*arguments).ret == 0
    assert flagged.evidence("selection")[0]["in_part"] == in_part


@pytest.mark.parametrize(
    "arguments",
    ["-k nothing", "-k nothing -n2", "-m M3", "-m M3 -n2", "-m M0_and_M1"],
)
def test_an_empty_selection_is_incomplete(flagged, arguments):
    words = [word.replace("_", " ") for word in arguments.split()]
    assert flagged.run("m1_toy.py", *words).ret == 6
    assert flagged.end()["verdict"] == "INCOMPLETE"


def test_last_failed_runs_the_part_that_failed_and_says_so(flagged):
    assert flagged.run().ret == 1
    (flagged.path / "mended").touch()
    result = flagged.run("m1_toy.py", "--lf")
    assert result.ret == 0
    assert [gate["gate"] for gate in flagged.evidence("gate")] == ["m1_toy::test_flag"]
    assert flagged.evidence("run")[0]["selection"]["last_failed"] is True
    result.stdout.fnmatch_lines(["PASSED*1 of 2 collected*"])


def test_last_failed_again_fails_while_it_fails(flagged):
    assert flagged.run().ret == 1
    assert flagged.run("m1_toy.py", "--lf").ret == 1


@PROCESSES
def test_stopping_at_the_first_failure_fails_and_counts_what_was_left(toy, workers):
    wrong = GATES.replace("equal=2", "equal=3")
    toy.gates(wrong)
    assert toy.run("m1_toy.py", "-x", *workers).ret == 1
    assert toy.end()["verdict"] == "FAILED"
    if not workers:
        assert any(
            "2 gate runs: that many were selected, 1 recorded" in p for p in toy.end()["problems"]
        )


def test_stopping_after_a_not_run_gate_is_no_pass(toy):
    toy.gates(GATES.replace("    check(", "    not_run('no device'); check("))
    assert toy.run("m1_toy.py", "-x").ret == 6


def test_ctrl_c_leaves_complete_evidence_that_says_so(toy):
    toy.gates(GATES.replace('    check("mended"', '    raise KeyboardInterrupt; check("mended"'))
    assert toy.run(new_process=True).ret == 2
    end = toy.end()
    assert (end["interrupted"], end["verdict"], end["exit_status"]) == (True, "INCOMPLETE", 2)
    assert toy.verdicts() == ["PASS"]
    assert (toy.folder / "report.html").is_file()


def test_ctrl_c_is_no_pass_even_where_incomplete_is_allowed(toy):
    toy.gates(GATES.replace('    check("mended"', '    raise KeyboardInterrupt; check("mended"'))
    assert toy.run("m1_toy.py", "--allow-incomplete", new_process=True).ret == 2


def test_a_gate_file_that_does_not_import_fails_the_run(flagged):
    (flagged.path / "m2_broken.py").write_text("import no_such_package")
    (flagged.path / "mended").touch()
    assert flagged.run("m1_toy.py", "m2_broken.py").ret == 1
    assert flagged.run("m1_toy.py", "m2_broken.py", "--continue-on-collection-errors").ret == 1
    assert flagged.end()["verdict"] == "FAILED"


def test_another_test_that_fails_in_the_same_run_fails_it(flagged):
    (flagged.path / "mended").touch()
    flagged.pytester.makepyfile(test_other="def test_other():\n    raise ValueError")
    assert flagged.run("m1_toy.py", "test_other.py").ret == 1
    assert flagged.end()["verdict"] == "FAILED"


@pytest.mark.parametrize(("body", "status"), [("pass", 0), ("raise ValueError", 1)])
def test_a_project_without_gates_is_left_alone(pytester, body, status):
    pytester.makepyfile(f"def test_it():\n    {body}")
    assert pytester.runpytest().ret == status
    assert not (pytester.path / "evidence").exists()


def test_a_project_without_tests_keeps_pytest_s_own_status(pytester):
    assert pytester.runpytest().ret == 5


def test_collecting_only_writes_no_evidence(flagged):
    assert flagged.run("m1_toy.py", "--collect-only", "-m", "M1").ret == 0
    assert not (flagged.path / "evidence").exists()


def test_the_same_gates_run_with_asserts_stripped(toy):
    import sys

    toy.gates(GATES)
    command = [sys.executable, "-O", "-m", "pytest", "m1_toy.py", "-q"]
    assert toy.pytester.run(*command).ret == 1, "a check is no assert"


def test_a_broken_file_of_another_project_writes_no_evidence(pytester):
    pytester.makepyfile(test_broken="import no_such_package")
    assert pytester.runpytest().ret == 2
    assert not (pytester.path / "evidence").exists()


def test_a_milestone_that_is_asked_for_and_not_there_is_no_pass(toy):
    toy.gates()
    result = toy.run(".", "-m", "M1 or M3")
    assert result.ret == 6
    assert "No gate of M3 ran, though -m asks for it." in toy.end()["problems"]
    assert toy.run(".", "-m", "M1 and not M3").ret == 0


def test_last_failed_over_a_folder_is_a_part(flagged):
    assert flagged.run(".").ret == 1
    (flagged.path / "mended").touch()
    assert flagged.run("--lf", "-m", "M1", ".").ret == 0
    assert flagged.evidence("selection")[0]["in_part"] == ["M1"]


def test_a_project_with_gates_of_its_own_runs_those(flagged):
    (flagged.path / "mended").touch()
    assert flagged.run("-m", "M1").ret == 0
    assert {gate["gate"] for gate in flagged.evidence("gate")} == {
        "m1_toy::test_right",
        "m1_toy::test_flag",
    }


def test_sigterm_leaves_complete_evidence(toy):
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    toy.gates(GATES.replace('    check("mended"', f'    {kill}; check("mended"'))
    assert toy.run(new_process=True).ret == 2
    assert toy.end()["interrupted"] is True


def test_a_path_that_is_not_there_leaves_no_evidence(toy):
    assert toy.run("-m", "M1", "no_such_file.py").ret == 4
    assert not list(toy.path.glob("evidence/*/*"))
