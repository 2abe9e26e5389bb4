"""The sanitize command: it calls every role, and judges what the tool says."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from candidates.tilelang.sanitize import __main__ as sanitize
from candidates.tilelang.sanitize.calls import EVERY_ROLE, FINISHED, calls

CLEAN = "========= ERROR SUMMARY: 0 errors"
WRITE = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 1 error"
RACE = (
    "========= Error: Race reported between Write access at program_kernel+0x90\n"
    "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
)
OUT_OF_MEMORY = "========= out of memory on cudaMalloc\n========= ERROR SUMMARY: 1 error"
MANY = "========= ERROR SUMMARY: 9 errors\n========= ERROR SUMMARY: 4 errors were not printed."


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a program in place of compute-sanitizer and of python, which says what a test asks."""

    def says(planted, operators, alone=FINISHED, then="exit 0"):
        program = tmp_path / "compute-sanitizer"
        program.write_text(
            "#!/bin/sh\n"
            'case "$*" in\n'
            f"  --tool*operators) echo '{operators}'; {then};;\n"
            f"  --tool*) echo '{planted}'; exit 1;;\n"
            f"  *) echo '{alone}';;\n"
            "esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sanitize, "sanitizer", lambda: str(program))
        monkeypatch.setattr(sanitize, "missing", lambda: "")
        monkeypatch.setattr(sys, "executable", str(program))

    return says


def is_running(argument):
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended by now
            if argument in file.read_text().split("\0"):
                return True
    return False


def finished(report):
    return f"{FINISHED}\n{report}"


def test_every_role_is_called():
    assert {name for name, _, _ in calls(1, torch.float32, "cpu")} == set(EVERY_ROLE)


@pytest.mark.parametrize(("name", "planted"), [("memcheck", WRITE), ("racecheck", RACE)])
def test_planted_errors_reported_and_operators_clean(tool, capsys, name, planted):
    tool(finished(planted), finished(CLEAN))
    assert sanitize.main(["--tools", name]) == 0
    assert capsys.readouterr().out.endswith("no report\n")


@pytest.mark.parametrize(
    ("planted", "operators", "said"),
    [
        (finished(WRITE), finished(MANY), "FAILED ========= ERROR SUMMARY: 9 errors"),
        (finished(CLEAN), finished(CLEAN), "no report of 'Invalid __global__ write'"),
        (finished(OUT_OF_MEMORY), finished(CLEAN), "no report of 'Invalid __global__ write'"),
        (WRITE, finished(CLEAN), "did not run to its end"),
        (finished(WRITE), CLEAN, "did not run to its end"),
        (finished(WRITE), FINISHED, "did not run to its end"),
    ],
)
def test_anything_else_fails(tool, capsys, planted, operators, said):
    tool(planted, operators)
    assert sanitize.main(["--tools", "memcheck"]) == 1
    assert said in capsys.readouterr().out


def test_operators_that_do_not_run_at_all(tool, capsys):
    tool(finished(WRITE), finished(CLEAN), alone="no device")
    assert sanitize.main([]) == 1
    assert "do not run to their end: no device" in capsys.readouterr().out


def test_a_run_that_takes_too_long_says_how_far_it_came_and_leaves_nothing_behind(tool, capsys):
    tool(finished(WRITE), "rope, 129 tokens", then="sleep 1234567")
    assert sanitize.main(["--tools", "memcheck", "--timeout", "1"]) == 1
    assert "rope, 129 tokens\n\nnot done after 1 s" in capsys.readouterr().out
    assert not is_running("1234567")


@pytest.mark.parametrize("arguments", [["--tools", "memcheck,"], ["--timeout", "0"]])
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(SystemExit):
        sanitize.main(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert sanitize.main([]) == 2
    assert "this needs a Hopper GPU" in capsys.readouterr().out
