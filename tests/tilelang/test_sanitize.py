"""The sanitize command: it calls every role, and judges what the tool says."""

import shutil

import pytest
import torch

from candidates.tilelang.sanitize import __main__ as sanitize
from candidates.tilelang.sanitize.calls import EVERY_ROLE, calls

CLEAN = "========= ERROR SUMMARY: 0 errors"
ONE_ERROR = "========= ERROR SUMMARY: 1 error"
ONE_HAZARD = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def tool_that_says(monkeypatch, folder, planted, operators, then="exit 0"):
    """Puts a compute-sanitizer on the PATH that prints one line, for operators before `then`."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" operators") echo "{operators}"; {then};; esac\n'
        f'echo "{planted}"; exit 1\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_every_role_is_called():
    assert {name for name, _, _ in calls(1, torch.float32, "cpu")} == set(EVERY_ROLE)


def test_planted_errors_reported_and_operators_clean(monkeypatch, tmp_path):
    tool_that_says(monkeypatch, tmp_path, planted=ONE_HAZARD, operators=CLEAN)
    assert sanitize.main([]) == 0


@pytest.mark.parametrize(
    ("planted", "operators", "status", "said"),
    [
        (ONE_ERROR, ONE_ERROR, 0, "FAILED " + ONE_ERROR),
        (CLEAN, CLEAN, 0, "the planted error was not seen"),
        (ONE_ERROR, CLEAN, 3, "ended with status 3"),
        (ONE_ERROR, "no device", 1, "the tool gave no summary: no device"),
    ],
)
def test_anything_else_fails(monkeypatch, tmp_path, capsys, planted, operators, status, said):
    tool_that_says(monkeypatch, tmp_path, planted, operators, f"exit {status}")
    assert sanitize.main(["--tools", "memcheck"]) == 1
    assert said in capsys.readouterr().out


def test_a_run_that_takes_too_long_says_how_far_it_came(monkeypatch, tmp_path, capsys):
    tool_that_says(monkeypatch, tmp_path, ONE_ERROR, "rope, 129 tokens", "exec sleep 60")
    assert sanitize.main(["--tools", "memcheck", "--timeout", "1"]) == 1
    assert "had come to: rope, 129 tokens" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "compute-sanitizer")
    assert sanitize.main([]) == 2
    assert "an NVIDIA GPU" in capsys.readouterr().out
