"""The pytest plugin: options, collection, and the verdict of each gate.

A file ``m2_*.py`` holds gates of milestone M2. Each gate runs on the stack on trial and, with the
same seed, on every fault and benign variant that names it. Recording is in ``recorder``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from harness.contract import MILESTONES, RUNGS, Gate, Variant, variants_beside

GATE_FILE = re.compile(r"m([0-6])_\w+\.py")
pytest_plugins = ["harness.fixtures", "harness.rank_options", "harness.recorder"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("touchstone", "Touchstone: gates of LLM training")
    group.addoption(
        "--device", choices=("cpu", "cuda", "npu"), default="cpu", help="where the gates run"
    )
    group.addoption(
        "--candidate",
        action="append",
        default=[],
        metavar="MODULE",
        help="put the ROLES of this module on trial; repeatable; candidates.NAME for short: NAME",
    )
    group.addoption("--rung", choices=RUNGS, default="L0", help="the model scale (default L0)")
    group.addoption(
        "--evidence",
        type=Path,
        metavar="DIR",
        help="where the evidence is written (default evidence/RUN); must not hold evidence yet",
    )
    group.addoption(
        "--allow-incomplete",
        action="store_true",
        help="exit 0 although something was not run; the report says so at its top",
    )
    group.addoption(
        "--no-faults",
        action="store_true",
        help="leave the faults out; benign variants still run",
    )
    group.addoption("--seed", type=int, default=0, help="changes every gate's seed (default 0)")
    parser.addini(
        "touchstone_reference",
        default="reference.stack",
        help="the module whose ROLES are the reference stack",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "m[0-6]_*.py")
    for milestone in MILESTONES:
        config.addinivalue_line("markers", f"{milestone}: gates of milestone {milestone}")
    for name in re.findall(r"\b[mM]\d+\b", config.option.markexpr):
        if name not in MILESTONES:
            raise pytest.UsageError(
                f"-m {config.option.markexpr!r}: unknown milestone {name!r}; "
                f"the milestones are {', '.join(MILESTONES)}"
            )
    if asked_for_gates(config) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        package = importlib.util.find_spec("gates")  # from another project, which has no gates
        if package and not any(map(_holds_gates, config.args)):
            config.args = list(package.submodule_search_locations or [])


def _holds_gates(folder: str) -> bool:
    """Whether gate files stand in a folder or right below it."""
    files = [*Path(folder).glob("m[0-6]_*.py"), *Path(folder).glob("*/m[0-6]_*.py")]
    return any(GATE_FILE.fullmatch(file.name) for file in files)


def asked_for_gates(config: pytest.Config) -> bool:
    """Whether the command line speaks of gates, so that finding none is INCOMPLETE."""
    option = config.option
    return bool(
        option.candidate
        or option.evidence
        or option.device != "cpu"
        or re.search(r"\bM[0-6]\b", option.markexpr)
    )


# --- collection ----------------------------------------------------------------------------


def gate_of(item: pytest.Item) -> Gate | None:
    """The contract of a gate's item; None for an ordinary test."""
    return getattr(getattr(item, "function", None), "gate", None)


def gate_name(item: pytest.Item) -> str:
    """``file::function``, as faults name it."""
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"


@pytest.hookimpl(trylast=True)  # after the gate's own parameters: the variant comes last in the id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.definition.path
    if not GATE_FILE.fullmatch(path.name):
        return
    name = gate_name(metafunc.definition)
    if getattr(metafunc.function, "gate", None) is None:
        raise pytest.UsageError(f"{name} stands in a gate file but is not marked with @gate")
    if "stack" not in metafunc.fixturenames:
        raise pytest.UsageError(f"gate {name} takes no stack, so nothing would be on trial")
    no_faults = metafunc.config.getoption("--no-faults")
    declared = list(variants_beside(metafunc.module))
    _refuse_dangling_names(declared, metafunc)
    variants = [
        variant
        for variant in declared
        if variant.cases(name) != set() and not (no_faults and variant.kind == "fault")
    ]
    on_trial = "+".join(metafunc.config.getoption("--candidate")) or "reference"
    ids = [on_trial] + [f"{variant.kind}:{variant.name}" for variant in variants]
    metafunc.parametrize("stack", [None, *variants], indirect=True, ids=ids)


def _refuse_dangling_names(variants: list[Variant], metafunc: pytest.Metafunc) -> None:
    """A fault that names no gate would never run, and nobody would miss it."""
    from harness.fixtures import trial_of

    roles, file = trial_of(metafunc.config).reference.roles, metafunc.definition.path.stem
    for variant in variants:
        if variant.role not in roles:
            raise pytest.UsageError(
                f"{variant.kind} {variant.name} replaces the role {variant.role!r}, which is none"
            )
        for named in variant.gates:
            gate_file, _, function = named.partition("[")[0].partition("::")
            if gate_file == file and not hasattr(metafunc.module, function):
                raise pytest.UsageError(
                    f"{variant.kind} {variant.name} names {named}, but {file}.py has no {function}"
                )


def variant_of(item: pytest.Item) -> Variant | None:
    """The fault or benign variant that an item runs on; None for the stack on trial."""
    callspec = getattr(item, "callspec", None)
    variant = callspec.params.get("stack") if callspec else None
    return variant if isinstance(variant, Variant) else None


def case_of(item: pytest.Item) -> str:
    """The id of the gate's own parameters, without the variant."""
    return "-".join(item.callspec._idlist[:-1])  # type: ignore[attr-defined]


def pytest_itemcollected(item: pytest.Item) -> None:
    match = GATE_FILE.fullmatch(item.path.name)
    if gate_of(item) is None:
        return
    if match is None:
        raise pytest.UsageError(
            f"{item.nodeid} is a gate, but its file's name gives no milestone; call it "
            "m0_….py to m6_….py"
        )
    item.add_marker(f"M{match[1]}")


def drop_unmeant_cases(items: list[pytest.Item]) -> None:
    """Drop the cases in which a variant is not meant to show, and those of too many ranks.

    Raises:
        pytest.UsageError: a variant names a case that the gate, collected whole, does not have.
    """
    from harness.rank_options import is_too_large

    cases: dict[str, set[str]] = {}
    for item in items:
        if gate_of(item):
            cases.setdefault(gate_name(item), set()).add(case_of(item))
    variants = {variant for item in items if (variant := variant_of(item))}
    if items and _collects_part_of_a_gate(items[0].config):
        variants = set()
    for variant in variants:
        for gate, found in cases.items():
            dangling = (variant.cases(gate) or set()) - found
            if dangling:
                raise pytest.UsageError(
                    f"{variant.kind} {variant.name} names the case {min(dangling)!r} of {gate}, "
                    f"which has {', '.join(sorted(found)) or 'no cases'}"
                )
    items[:] = [item for item in items if _is_meant(item) and not is_too_large(item)]


def _collects_part_of_a_gate(config: pytest.Config) -> bool:
    named = any("[" in argument for argument in config.args)
    return named or getattr(config.option, "lf", False)


def _is_meant(item: pytest.Item) -> bool:
    variant = variant_of(item)
    if variant is None:
        return True
    cases = variant.cases(gate_name(item))
    return cases is None or case_of(item) in cases


# --- one gate ------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: what xfail and others said is undone
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    gate = gate_of(item)
    if gate is None:
        return report
    from harness import judge

    return judge.phase(item, gate, call, report)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if getattr(report, "gate", None) and report.skipped:
        return "not run", "n", "NOT_RUN"
    return None
