"""What a gate may ask for: stack, recipe, check, rng, device, rung, for_all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from harness.candidates import Trial
    from harness.checks import Check
    from harness.contract import Stack
    from harness.portable import Recipe


TRIAL = pytest.StashKey["Trial"]()


def trial_of(config: pytest.Config) -> Trial:
    """What is on trial, loaded once a process. Raises pytest.UsageError on a bad candidate."""
    from harness.candidates import load_trial

    if TRIAL not in config.stash:
        config.stash[TRIAL] = load_trial(config)
    return config.stash[TRIAL]


def seed_of(item: pytest.Item) -> int:
    """A seed from the names of the gate and its case: the same for every variant."""
    from harness.plugin import case_of, gate_name

    text = f"{gate_name(item)}[{case_of(item)}] seed {item.config.getoption('--seed')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """How another process builds the stack on trial, by names.

    Raises:
        ValueError: it stands on a variant that no other process can find.
    """
    from harness.plugin import variant_of
    from harness.portable import Recipe, name_of

    variant, config = variant_of(request.node), request.config
    return Recipe(
        config.getini("touchstone_reference"),
        tuple(config.getoption("--candidate")),
        config.getoption("--device"),
        name_of(variant) if variant else None,
    )


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Stack:
    """The stack on trial; for a fault or benign variant the reference with that role put in."""
    from harness.judge import counting

    trial = trial_of(request.config)
    variant = getattr(request, "param", None)
    if variant is None:
        on_trial = [origin["role"] for origin in trial.origins]
        return trial.stack.replace(counting(request.node, trial.stack, on_trial))
    return trial.reference.replace({variant.role: variant.build(trial.reference)})


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Records and judges the gate's measurements."""
    from harness.judge import check_of

    return check_of(request.node)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of ``--device``."""
    import torch

    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def rung(request: pytest.FixtureRequest) -> str:
    """The model scale of ``--rung``."""
    return str(request.config.getoption("--rung"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator on the CPU, seeded from the gate, its case and ``--seed``."""
    import torch

    return torch.Generator().manual_seed(seed_of(request.node))


@pytest.fixture
def for_all(request: pytest.FixtureRequest) -> Callable[..., Callable[[Callable[..., None]], None]]:
    """Run a property at once on examples that hypothesis draws, deterministically."""
    import hypothesis

    from harness.plugin import variant_of

    shrink = variant_of(request.node) is None  # of a fault it is enough that it was caught
    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if shrink else [])

    def decorator(
        max_examples: int = 50, **strategies: Any
    ) -> Callable[[Callable[..., None]], None]:
        def run(test: Callable[..., None]) -> None:
            settings = hypothesis.settings(
                max_examples=max_examples,
                phases=phases,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            drawn = hypothesis.given(**strategies)(test)
            hypothesis.seed(seed_of(request.node))(settings(drawn))()

        return run

    return decorator


OWN = ("stack", "check", "device", "rung", "rng", "for_all", "recipe", "ranks")
OWN_MODULES = ("harness.fixtures", "harness.rank_options")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a device that is not there; put flags, threads and seeds where the run has them."""
    from harness.contract import not_run
    from harness.plugin import gate_of

    if gate_of(item) is None:
        return
    import random

    import numpy
    import torch

    from harness.devices import force_numerics

    _refuse_shadowed_fixtures(item)
    trial = trial_of(item.config)
    if trial.device.missing:
        not_run(trial.device.missing)
    torch.set_num_threads(int(trial.flags["torch.get_num_threads"]))
    force_numerics(trial.device)
    seed = seed_of(item)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(wrapper=True)  # after the teardown itself, which an error here must not stop
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """What is on trial may not leave the process with other numerics than the run recorded."""
    from harness.plugin import gate_of, variant_of

    yield
    trial = item.config.stash.get(TRIAL, None)
    if gate_of(item) is None or variant_of(item) is not None or trial is None:
        return
    from harness.devices import numerics

    now = numerics(trial.device)
    changed = [f"{flag} is {now[flag]}, was {was}" for flag, was in trial.flags.items()
               if now[flag] != was]  # fmt: skip
    if changed:
        raise RuntimeError(f"what is on trial changed the process: {'; '.join(changed)}")


def _refuse_shadowed_fixtures(item: pytest.Item) -> None:
    """A conftest with a fixture called ``stack`` would put something else on trial."""
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():  # type: ignore[attr-defined]
        if name in OWN and definitions[-1].func.__module__ not in OWN_MODULES:
            raise ValueError(
                f"the fixture {name} of {definitions[-1].baseid or 'a conftest'} hides "
                f"Touchstone's own; rename it"
            )
