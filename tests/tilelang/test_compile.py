"""The compile command: it knows every kernel of every role, and compiles them without a GPU."""

import shutil

import pytest

from candidates.tilelang import ROLES, compile
from candidates.tilelang.presets import PRESETS


def test_every_kernel_that_a_role_can_launch_is_compiled():
    launched = {name for role in ROLES.values() for name in role.kernel_calls()}
    assert {program.__name__ for program, _ in compile.chosen((), list(PRESETS))} == launched


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_matrix_product_uses_the_tensor_cores_and_spills_nothing(capsys):
    arguments = ["--only", "matrix_product,swiglu_forward", "--presets", "0.5B", "--jobs", "1"]
    assert compile.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    products = [line for line in lines if "matrix_product" in line and "bfloat16" in line]
    assert products and all(line.split()[2:5] == ["0", "yes", "yes"] for line in products)


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch):
    def broken(d, width):
        raise ValueError(f"no tile of width {width}")

    report = compile.report((broken, (3,)))
    assert report.error == "no tile of width 3"


def test_an_unknown_program_is_a_usage_error():
    with pytest.raises(SystemExit):
        compile.main(["--only", "no_such_program"])
