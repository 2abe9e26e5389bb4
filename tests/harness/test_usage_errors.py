"""Bad input: a sentence that helps, exit status 4, and no evidence."""

import os
import resource
import subprocess
import sys

import pytest

from harness.devices import KINDS, find


def refused(toy, *arguments):
    toy.gates()
    result = toy.run("m1_toy.py", *arguments)
    assert result.ret == 4
    assert not (toy.path / "evidence").exists()
    return " ".join(" ".join(result.outlines + result.errlines).split())


@pytest.mark.parametrize("expression", ["M7", "M1 or M9", "m1", "not M10"])
def test_an_unknown_milestone(toy, expression):
    assert "the milestones are M0, M1, M2" in refused(toy, "-m", expression)


@pytest.mark.parametrize("option", ["--device", "--rung"])
def test_an_unknown_choice(toy, option):
    assert "invalid choice: 'tpu'" in refused(toy, option, "tpu")


def test_a_seed_that_is_no_number(toy):
    assert "invalid int value" in refused(toy, "--seed", "first")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "cannot import it: ModuleNotFoundError: No module named 'mine'"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "must define ROLES"),
        ("ROLES = {}", "must define ROLES"),
        ("ROLES = {'double': 3}", "must define ROLES"),
        ("ROLES = {'triple': abs}", "unknown role 'triple'; the roles are double, half"),
        ("ROLES = {'double': lambda: 2}", "cannot be called as double(x)"),
        ("ROLES = {'double': lambda x, y: 2}", "cannot be called as double(x)"),
        ("ROLES = {'double': lambda *, x: 2}", "cannot be called as double(x)"),
        ("ROLES = {'double': max}", "no signature that Python can read"),
    ],
)
def test_a_candidate_that_cannot_stand_trial(toy, body, message):
    if body is not None:
        toy.candidate(body)
    assert message in refused(toy, "--candidate", "mine")


@pytest.mark.parametrize("path", ["mine/kernels.py", "mine.py", "./mine"])
def test_a_file_is_no_module(toy, path):
    assert "give an importable module" in refused(toy, "--candidate", path)


def test_a_short_name_may_have_dots(toy):
    message = refused(toy, "--candidate", "peers.liger")  # of candidates.peers.liger
    assert "--candidate peers.liger: unknown role 'rms_norm'; the roles are double" in message


def test_a_name_that_is_nowhere(toy):
    message = refused(toy, "--candidate", "peers.nowhere")
    assert "cannot import it: ModuleNotFoundError: No module named 'peers'" in message


def test_two_candidates_for_one_role(toy):
    toy.candidate("ROLES = {'double': lambda x: 2 * x}")
    toy.candidate("ROLES = {'double': lambda x: x + x}", "yours")
    message = refused(toy, "--candidate", "mine", "--candidate", "yours")
    assert "'double' was already brought by another candidate" in message


def test_two_candidates_for_two_roles(toy):
    toy.gates(
        "@gate(claim='a claim', **about)\ndef test_both(stack, check):\n"
        "    check('v', stack.half(stack.double(3)), equal=3, because='arithmetic')\n"
    )
    toy.candidate("__version__ = '7.1'\nROLES = {'double': lambda x: 2 * x}")
    toy.candidate("ROLES = {'half': lambda x: x / 2}", "yours")
    assert toy.run("m1_toy.py", "--candidate", "mine", "--candidate", "yours").ret == 0
    mine, yours = toy.evidence("run")[0]["candidates"]
    assert (mine["role"], mine["module"], mine["version"]) == ("double", "mine", "7.1")
    assert (yours["role"], yours["version"]) == ("half", None)
    assert len(mine["sha256"]) == 64 and mine["sha256"] != yours["sha256"]


def test_a_candidate_in_a_package_of_the_current_folder(toy):
    toy.gates()
    package = toy.pytester.mkpydir("their")
    (package / "module.py").write_text("ROLES = {'double': lambda x: 2 * x}")
    assert toy.run("m1_toy.py", "--candidate", "their.module").ret == 0


def test_an_evidence_folder_that_is_a_file(toy):
    (toy.path / "taken").touch()
    assert "cannot write evidence" in refused(toy, "--evidence", "taken")


def test_an_evidence_folder_that_holds_evidence(toy):
    toy.gates()
    assert toy.run("m1_toy.py", "--evidence", "e").ret == 0
    before = (toy.path / "e" / "evidence.jsonl").read_bytes()
    assert "already holds the evidence of a run" in refused(toy, "--evidence", "e")
    assert (toy.path / "e" / "evidence.jsonl").read_bytes() == before


def test_an_evidence_folder_that_cannot_be_made(toy):
    assert "cannot write evidence" in refused(toy, "--evidence", "/proc/e")


@pytest.mark.parametrize("limit", [300, 2500, 6000])  # bytes a file may have
def test_a_disk_that_fills_up_is_no_pass_and_leaves_whole_lines(toy, limit):
    toy.gates()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "m1_toy.py", "--evidence", "e", "-p", "no:cacheprovider"],
        cwd=toy.path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    printed = result.stdout + result.stderr
    assert result.returncode not in (0, 1)
    assert "INTERNALERROR" not in printed and "Traceback" not in printed
    assert "File too large" in printed
    text = (toy.path / "e" / "evidence.jsonl").read_text()
    assert not text or text.endswith("}\n")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if find(kind).missing])
def test_a_device_that_is_not_there_is_incomplete_and_never_the_cpu(toy, kind):
    toy.gates()
    result = toy.run("m1_toy.py", "--device", kind)
    assert result.ret == 6
    assert toy.end()["verdict"] == "INCOMPLETE"
    assert set(toy.verdicts()) == {"NOT_RUN"}
    assert all("install" in gate["reason"] for gate in toy.evidence("gate"))
    assert toy.evidence("run")[0]["device"]["kind"] == kind
