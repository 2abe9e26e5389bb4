"""The words a gate is written in: gate, fault, benign variant, stack.

A gate is a pytest function that states one contract. A fault is a deliberately wrong role that
named gates must reject; a benign variant is a different but right role that they must accept.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

Role = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])

MILESTONES = ("M0", "M1", "M2", "M3", "M4", "M5", "M6")
RUNGS = ("L0", "L1", "L2", "L3", "L4")


def not_run(reason: str) -> NoReturn:
    """End the running gate with the verdict NOT_RUN and the ``reason``, one full sentence."""
    pytest.skip(reason)


@dataclass(frozen=True)
class Stack:
    """A full set of roles: those of the reference, with a candidate's put in.

    ``stack.rms_norm(x, weight, eps)`` calls the role. An unknown role is an AttributeError that
    lists the known ones. ``dtypes`` are those that everything on trial takes on the run's device,
    the widest first; a gate asks for no other.
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = ()

    def __getattr__(self, role: str) -> Role:
        if role.startswith("__") or role == "roles":  # copy and pickle look before __init__ ran
            raise AttributeError(role)
        try:
            return self.roles[role]
        except KeyError:
            known = ", ".join(sorted(self.roles))
            raise AttributeError(f"the stack has no role {role!r}; it has {known}") from None

    def replace(self, roles: Mapping[str, Role]) -> Stack:
        """The same stack with ``roles`` put in."""
        return Stack({**self.roles, **roles}, self.dtypes)


@dataclass(frozen=True)
class Gate:
    """What a gate claims and on what ground. Attached to the gate function by ``@gate``."""

    claim: str
    roles: tuple[str, ...]
    not_claimed: str
    source: str


@dataclass(frozen=True)
class Variant:
    """A fault or a benign variant: ``build(reference_stack)`` returns the role to put in."""

    kind: str  # "fault" | "benign"
    name: str
    role: str
    gates: tuple[str, ...]  # "file::function" or "file::function[case]"
    summary: str
    origin: str  # fault: where it was seen; benign: why it is right
    build: Callable[[Stack], Role]

    def cases(self, gate: str) -> set[str] | None:
        """The cases of ``gate`` this variant runs in: None for all, an empty set for none."""
        named = {name.partition("[")[2].rstrip("]") for name in self.gates if _base(name) == gate}
        return None if "" in named else named


def gate(
    *, claim: str, roles: Iterable[str], not_claimed: str, source: str
) -> Callable[[Function], Function]:
    """Mark a pytest function as a gate.

    Args:
        claim: what holds when the gate passes, in one sentence.
        roles: the roles on trial.
        not_claimed: what a reader might think it shows, and it does not.
        source: where the contract comes from.

    Raises:
        ValueError: an empty text or no role.
    """
    contract = Gate(claim, tuple(roles), not_claimed, source)
    if not (claim and contract.roles and not_claimed and source):
        raise ValueError(f"a gate states claim, roles, not_claimed and source; got {contract}")

    def mark(function: Function) -> Function:
        function.gate = contract  # type: ignore[attr-defined]
        return function

    return mark


def fault(
    *, role: str, caught_by: str | list[str], seen_in: str
) -> Callable[[Callable[[Stack], Role]], Variant]:
    """Declare a wrong ``role`` that the gates in ``caught_by`` must reject by their measurement.

    ``caught_by`` names ``file::function`` (every case must reject it) or ``file::function[case]``.
    The docstring's first line says what is wrong. ``seen_in`` names the public report, or "own".
    """
    return _variant("fault", role, caught_by, seen_in)


def benign(
    *, role: str, accepted_by: str | list[str], because: str
) -> Callable[[Callable[[Stack], Role]], Variant]:
    """Declare a different but right ``role`` that the gates in ``accepted_by`` must accept."""
    return _variant("benign", role, accepted_by, because)


def _variant(
    kind: str, role: str, gates: str | list[str], origin: str
) -> Callable[[Callable[[Stack], Role]], Variant]:
    names = (gates,) if isinstance(gates, str) else tuple(gates)

    def declare(build: Callable[[Stack], Role]) -> Variant:
        summary = (build.__doc__ or "").strip().partition("\n")[0]
        if not (names and summary and origin):
            raise ValueError(
                f"{kind} {build.__name__}: it needs at least one gate, an origin, and a docstring "
                "whose first line says what it does (python -OO strips docstrings: do not use it)"
            )
        return Variant(kind, build.__name__, role, names, summary, origin, build)

    return declare


def _base(name: str) -> str:
    return name.partition("[")[0]


def variants_beside(module: ModuleType) -> Iterator[Variant]:
    """Every fault and benign variant in the ``faults`` package beside a gate's module.

    One that a second module of the package imports is the same one.
    """
    name = f"{module.__package__}.faults" if module.__package__ else "faults"
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return
        raise
    found = dict[int, Variant]()
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        family = importlib.import_module(f"{name}.{info.name}")
        found |= {id(value): value for value in vars(family).values() if isinstance(value, Variant)}
    yield from found.values()
