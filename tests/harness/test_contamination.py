"""What is on trial cannot put something else on trial, nor change what comes after it."""

import pytest

GATES = """
import torch

@gate(claim="a first gate calls the role", **about)
def test_a(stack, check):
    check("value", stack.double(1), equal=2, because="it is arithmetic")

@gate(claim="a second gate finds the process as it was", **about)
def test_b(stack, check):
    check("dtype", str(torch.get_default_dtype()), equal="torch.float32", because="forced")
    check("gradients", torch.is_grad_enabled(), equal=True, because="forced")
"""
MEDDLING = {
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "gradients": "torch.set_grad_enabled(False)",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "determinism": "torch.use_deterministic_algorithms(False)",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
}


@pytest.mark.parametrize("line", MEDDLING.values(), ids=MEDDLING.keys())
def test_a_candidate_that_changes_the_numerics_is_an_error_and_the_next_gate_is_clean(toy, line):
    toy.gates(GATES)
    toy.candidate(f"import torch\ndef double(x):\n    {line}\n    return 2 * x\n"
                  "ROLES = {'double': double}")  # fmt: skip
    assert toy.run("m1_toy.py", "--candidate", "mine").ret == 1
    first, second = toy.evidence("gate")
    assert (first["verdict"], second["verdict"]) == ("ERROR", "PASS")
    assert "what is on trial changed the process" in first["reason"]


def test_a_fault_that_changes_the_numerics_does_not_reach_the_next_gate(toy):
    toy.gates(GATES)
    toy.faults(
        "import torch\n"
        "@fault(role='double', caught_by='m1_toy::test_a', seen_in='own')\n"
        "def meddles(reference):\n    'Changes the default dtype.'\n"
        "    def double(x):\n        torch.set_default_dtype(torch.float64)\n        return 3 * x\n"
        "    return double\n"
    )
    assert toy.run().ret == 0


@pytest.mark.parametrize("name", ["stack", "check", "device", "rng", "rung", "for_all"])
def test_a_conftest_cannot_hide_a_fixture_of_the_harness(toy, name):
    toy.gates(GATES.replace("(stack, check)", "(stack, check, device, rng, rung, for_all)"))
    toy.pytester.makeconftest(f"import pytest\n@pytest.fixture\ndef {name}():\n    return print\n")
    assert toy.run().ret == 1
    assert toy.verdicts() == ["ERROR", "ERROR"]
    assert f"the fixture {name}" in toy.evidence("gate")[0]["reason"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("role='double', caught_by='m1_toy::test_c'", "m1_toy.py has no test_c"),
        ("role='dubble', caught_by='m1_toy::test_a'", "the role 'dubble', which is none"),
        ("role='double', caught_by='m1_toy::test_a[7]'", "names the case '7'"),
    ],
)
def test_a_fault_that_would_never_run_is_refused(toy, fault, message):
    toy.gates(GATES)
    toy.faults(f"@fault({fault}, seen_in='own')\ndef lost(reference):\n    'Lost.'\n")
    result = toy.run(new_process=True)
    assert result.ret in (1, 4)
    assert message in result.stdout.str() + result.stderr.str()


def test_a_measurement_of_numpy_s_own_kind_travels_over_workers(toy):
    toy.gates(
        "import numpy\n"
        "@gate(claim='numpy', **about)\ndef test_n(stack, check):\n"
        "    check('v', numpy.float64(2), at_most=1, because='b')\n"
    )
    assert toy.run("m1_toy.py", "-n2", "--allow-incomplete").ret == 1
    assert toy.verdicts() == ["FAIL"]


def test_a_gate_in_a_file_without_a_milestone_is_refused(toy):
    toy.gates(GATES, "test_ordinary")
    result = toy.run("test_ordinary.py")
    assert result.ret == 4
    assert "gives no milestone" in result.stderr.str()


def test_a_candidate_that_no_gate_called_did_not_pass(toy):
    toy.gates(GATES)
    toy.candidate("ROLES = {'double': lambda x: 2 * x, 'half': lambda x: 1 / 0}")
    assert toy.run("m1_toy.py", "--candidate", "mine").ret == 6
    assert "No selected gate called the role half" in toy.end()["problems"][0]
    assert toy.evidence("gate")[0]["called"] == ["double"]
