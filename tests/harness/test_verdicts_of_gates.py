"""Every verdict, and the exit status of the run that holds it, alone and over two workers."""

import pytest

WRONG = "ROLES = {'double': lambda x: 2 * x + 1}"
GATE = """
@gate(claim="a claim", **about)
def test_double(stack, check):
    %s
"""
MEASURE = "check('value', stack.double(1), equal=2, because='arithmetic')"
PROCESSES = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "xdist"])


@PROCESSES
def test_the_reference_passes(toy, workers):
    toy.gates()
    assert toy.run("m1_toy.py", *workers).ret == 0
    assert toy.end()["verdict"] == "PASSED"
    assert toy.verdicts() == ["PASS"] * 3


@PROCESSES
def test_a_wrong_candidate_fails_with_its_number(toy, workers):
    toy.gates()
    toy.candidate(WRONG)
    result = toy.run("m1_toy.py", "--candidate", "mine", *workers)
    assert result.ret == 1
    assert toy.end()["verdict"] == "FAILED"
    assert toy.verdicts() == ["FAIL"] * 3
    assert sorted(gate["measurements"][0]["value"] for gate in toy.evidence("gate")) == [1, 3, 7]
    result.stdout.fnmatch_lines(["*FAIL*value: measured 3, must be equal 2*"])


@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        ("raise RuntimeError('no kernel')", "ERROR", "RuntimeError: no kernel"),
        ("assert stack.double(1) == 3", "ERROR", "AssertionError"),
        ("stack.double(1)", "ERROR", "the gate measured nothing"),
        ("stack.triple(1)", "ERROR", "the stack has no role 'triple'; it has double, half"),
        ("pytest.skip('no compiler')", "NOT_RUN", "no compiler"),
        ("not_run('two ranks are needed')", "NOT_RUN", "two ranks are needed"),
        ("pytest.importorskip('a_package_that_is_not_there')", "NOT_RUN", "could not import"),
        (f"{MEASURE}; raise RuntimeError('late')", "ERROR", "RuntimeError: late"),
        (f"{MEASURE}; not_run('half way')", "NOT_RUN", "half way"),
        (
            "\n    ".join(["try:", "    check('v', 1, equal=2, because='b')", "except Exception:"])
            + "\n        pass",
            "FAIL",
            "swallowed",
        ),
        ("check('v', float('nan'), at_most=1, because='b')", "FAIL", "measured nan"),
        ("pytest.xfail('known')", "ERROR", "known"),
    ],
)
def test_verdict_and_reason(toy, body, verdict, reason):
    toy.gates(GATE % body)
    result = toy.run()
    (record,) = toy.evidence("gate")
    assert record["verdict"] == verdict
    assert reason in record["reason"]
    assert result.ret == (6 if verdict == "NOT_RUN" else 1)
    assert toy.end()["verdict"] == ("INCOMPLETE" if verdict == "NOT_RUN" else "FAILED")


def test_a_failing_teardown_is_an_error(toy):
    broken = "@pytest.fixture\ndef lock():\n    yield\n    raise OSError('still locked')\n"
    toy.gates(broken + (GATE % MEASURE).replace("(stack, check)", "(stack, check, lock)"))
    assert toy.run().ret == 1
    assert toy.verdicts() == ["ERROR"]


def test_a_missing_fixture_is_an_error(toy):
    toy.gates((GATE % MEASURE).replace("(stack, check)", "(stack, check, no_such_thing)"))
    assert toy.run().ret == 1
    assert toy.verdicts() == ["ERROR"]


@pytest.mark.parametrize("mark", ["skip(reason='later')", "skipif(True, reason='later')"])
def test_a_skip_mark_is_not_run(toy, mark):
    toy.gates(GATE.replace("@gate", f"@pytest.mark.{mark}\n@gate") % MEASURE)
    assert toy.run().ret == 6
    assert toy.verdicts() == ["NOT_RUN"]


def test_an_xfail_mark_excuses_nothing(toy):
    wrong = MEASURE.replace("equal=2", "equal=3")
    toy.gates(GATE.replace("@gate", "@pytest.mark.xfail\n@gate") % wrong)
    assert toy.run().ret == 1
    assert toy.verdicts() == ["FAIL"]


def test_an_xfail_mark_does_not_spoil_a_pass(toy):
    toy.gates(GATE.replace("@gate", "@pytest.mark.xfail(strict=True)\n@gate") % MEASURE)
    assert toy.run().ret == 0


@PROCESSES
def test_not_run_is_incomplete_unless_allowed(toy, workers):
    toy.gates(GATE % "not_run('no device')")
    assert toy.run("m1_toy.py", *workers).ret == 6
    result = toy.run("m1_toy.py", "--allow-incomplete", *workers)
    assert result.ret == 0
    assert toy.end()["verdict"] == "INCOMPLETE"
    result.stdout.fnmatch_lines(["*NOT_RUN*", "*no device*", "INCOMPLETE*"])


def test_a_worker_that_dies_is_an_error_of_its_gate(toy):
    toy.gates(GATE % "import os; os._exit(1)")
    assert toy.run("m1_toy.py", "-n2").ret == 1
    assert toy.verdicts() == ["ERROR"]
    assert toy.end()["verdict"] == "FAILED"


def test_seeds_come_from_the_name_and_the_option(toy):
    draw = "check.series('draws', torch.rand(3, generator=rng).tolist())"
    body = f"import torch; {draw}; {MEASURE}"
    source = (GATE % body).replace("(stack, check)", "(stack, check, rng)")
    toy.gates(source + source.replace("test_double", "test_other"))
    toy.faults(
        "@fault(role='double', caught_by='m1_toy::test_double', seen_in='own')\n"
        "def wrong(reference):\n    'Adds.'\n    return lambda x: x + 2\n"
    )

    def draws(*arguments):
        toy.run("m1_toy.py", *arguments)
        records = toy.evidence("gate") + toy.evidence("fault")
        return [record["series"][0]["y"] for record in records]

    first = draws()
    assert draws() == first, "the same seed draws the same"
    double, other, on_the_fault = first
    assert on_the_fault == double, "a fault sees what the candidate sees"
    assert other != double, "each gate draws its own"
    assert all(a != b for a, b in zip(draws("--seed", "1"), first, strict=True))


def test_properties_are_checked_on_the_same_examples_each_time(toy):
    toy.gates(
        "from hypothesis import strategies\n"
        + GATE.replace("(stack, check)", "(stack, check, for_all)")
        % """seen = []
    @for_all(x=strategies.integers(0, 10**6), max_examples=20)
    def _(x):
        seen.append(x)
        check('value', stack.double(x), equal=2 * x, because='arithmetic')
    check.series('examples', seen)"""
    )
    examples = []
    for arguments in ([], [], ["--seed", "5"]):
        assert toy.run("m1_toy.py", *arguments).ret == 0
        (record,) = toy.evidence("gate")
        assert record["measurements"][0]["count"] == len(record["series"][0]["y"]) >= 20
        examples.append(record["series"][0]["y"])
    assert examples[0] == examples[1] != examples[2]


def test_a_property_that_fails_is_a_fail_and_not_a_crash(toy):
    toy.gates(
        "from hypothesis import strategies\n"
        + GATE.replace("(stack, check)", "(stack, check, for_all)")
        % """@for_all(x=strategies.integers(0, 10**6))
    def _(x):
        check('value', x, at_most=10, because='it is small')"""
    )
    assert toy.run().ret == 1
    assert toy.verdicts() == ["FAIL"]
