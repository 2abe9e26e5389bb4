"""A candidate declares dtypes; gates, faults and benign variants are asked for no others."""

import pytest

GATE = """
@gate(claim="double doubles", **about)
def test_dtypes(stack, check):
    check("value", stack.double(1), equal=2, because="it is arithmetic")
    check("dtypes", [str(dtype) for dtype in stack.dtypes], equal={dtypes}, because="declared")
"""
FAULT = """
@fault(role="double", caught_by="m1_toy::test_dtypes", seen_in="own")
def triples(reference):
    \"\"\"Says which dtypes it is asked for.\"\"\"
    print("the fault is asked for", *reference.dtypes)
    return lambda x: 3 * x
"""
ALL = ["torch.float64", "torch.float32", "torch.bfloat16", "torch.float16"]
MINE = """
import torch
ROLES = {"double": lambda x: 2 * x}
DTYPES = {"cpu": (torch.float16, torch.float32), "cuda": (torch.bfloat16,)}
"""
YOURS = """
import torch
ROLES = {"half": lambda x: x / 2}
DTYPES = {"cpu": (torch.float16, torch.float64)}
"""


def gates(toy, dtypes):
    toy.gates(GATE.format(dtypes=dtypes))


def test_a_candidate_without_a_declaration_is_asked_for_every_dtype(toy):
    toy.candidate("ROLES = {'double': lambda x: 2 * x}")
    gates(toy, ALL)
    assert toy.run("m1_toy.py", "--candidate", "mine").ret == 0
    assert toy.run("m1_toy.py").ret == 0
    assert toy.evidence("run")[0]["dtypes"] == ALL


def test_a_candidate_is_asked_for_what_it_declares_the_widest_first(toy):
    toy.candidate(MINE)
    gates(toy, ["torch.float32", "torch.float16"])
    assert toy.run("m1_toy.py", "--candidate", "mine").ret == 0
    assert toy.evidence("run")[0]["dtypes"] == ["torch.float32", "torch.float16"]


def test_faults_are_caught_at_the_precision_of_the_candidate(toy):
    toy.candidate(MINE)
    toy.faults(FAULT)
    gates(toy, ["torch.float32", "torch.float16"])
    result = toy.run("m1_toy.py", "--candidate", "mine", "-s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*asked for torch.float32 torch.float16*"])


def test_two_candidates_are_asked_for_what_both_declare(toy):
    toy.candidate(MINE)
    toy.candidate(YOURS, "yours")
    toy.gates(
        "@gate(claim='a claim', **about)\ndef test_both(stack, check):\n"
        "    check('v', stack.half(stack.double(3)), equal=3, because='arithmetic')\n"
        "    check('n', [str(d) for d in stack.dtypes], equal=['torch.float16'], because='both')\n"
    )
    assert toy.run("m1_toy.py", "--candidate", "mine", "--candidate", "yours").ret == 0


def test_two_candidates_without_a_common_dtype_are_refused(toy):
    toy.candidate(MINE)
    toy.candidate(YOURS.replace("float16", "bfloat16"), "yours")
    toy.gates()
    result = toy.run("m1_toy.py", "--candidate", "mine", "--candidate", "yours")
    assert result.ret == 4
    assert "no dtype that all candidates take" in "".join(result.outlines + result.errlines)


@pytest.mark.parametrize(
    "dtypes",
    ["(torch.float32,)", "{}", "{'cpu': ()}", "{'cpu': ('float32',)}",
     "{'cpu': (torch.int64,)}", "{'cpu': torch.float32}"],
)  # fmt: skip
def test_a_declaration_that_names_no_dtype_of_the_device_is_refused(toy, dtypes):
    toy.candidate(f"import torch\nROLES = {{'double': lambda x: 2 * x}}\nDTYPES = {dtypes}")
    toy.gates()
    result = toy.run("m1_toy.py", "--candidate", "mine")
    assert result.ret == 4
    assert "DTYPES must be a dict from device kinds" in "".join(result.outlines + result.errlines)


def test_a_candidate_of_another_device_is_refused_by_that_name(toy):
    toy.candidate(
        "import torch\nROLES = {'double': lambda x: 2 * x}\nDTYPES = {'cuda': (torch.float32,)}"
    )
    toy.gates()
    result = toy.run("m1_toy.py", "--candidate", "mine")
    assert result.ret == 4
    message = " ".join(result.outlines + result.errlines)
    assert "it runs on cuda by its DTYPES, not on cpu; choose another --device" in message


def test_what_is_wrong_in_16_bits_is_planted_in_16_bits_too(toy):
    toy.faults(FAULT)
    gates(toy, "['torch.float32']")
    toy.candidate(
        "import torch\nROLES = {'double': lambda x: 2 * x}\nDTYPES = {'cpu': (torch.float32,)}"
    )
    result = toy.run("m1_toy.py", "--candidate", "mine", "-s")
    result.stdout.fnmatch_lines(
        ["*the fault is asked for torch.float32 torch.bfloat16 torch.float16*"]
    )
