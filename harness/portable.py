"""A stack by name: what another process needs to build the same one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.candidates import load_stacks, noting
from harness.contract import Stack, Variant


@dataclass(frozen=True)
class Recipe:
    """The names of what makes a stack: the reference, the candidates, or a variant in their place.

    ``variant`` is (module, name) of a fault or benign variant, which stands on the reference.
    """

    reference: str
    candidates: tuple[str, ...]
    device_kind: str
    variant: tuple[str, str] | None

    def build(self, note: Callable[[str], object] | None = None) -> Stack:
        """The stack, from modules that are imported here; ``note`` is told of calls of
        roles on trial."""
        reference, stack, on_trial = load_stacks(self.reference, self.candidates, self.device_kind)
        if self.variant is None:
            return stack if note is None else stack.replace(noting(stack, on_trial, note))
        variant = named(*self.variant)
        return reference.replace({variant.role: variant.build(reference)})


def named(module: str, name: str) -> Any:
    """What is called ``name`` in a module, imported here."""
    return getattr(importlib.import_module(module), name)


def name_of(variant: Variant) -> tuple[str, str]:
    """(module, name) under which another process finds a variant.

    Raises:
        ValueError: it is not at the top of an importable module.
    """
    module, name = variant.build.__module__, variant.build.__qualname__
    try:
        found = named(module, name)
    except (ImportError, AttributeError):
        found = None
    if found is not variant:
        raise ValueError(
            f"{variant.kind} {variant.name} is not found as {module}.{name}, so that no rank can "
            "build it; declare it at the top of an importable module"
        )
    return module, name
