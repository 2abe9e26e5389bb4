"""The ``check`` of a gate: a measurement is recorded first and judged second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from harness.verdict import margin, measurement_passes

Plain = float | int | bool | str | list[Any]


class CheckFailed(AssertionError):
    """A measurement passed its bound. The only way in which a gate FAILs."""


class Check:
    """Collects the measurements and the curves of one gate.

    ``check(name, value, at_most=…, because=…)`` takes exactly one bound:

    ======== ==================================================
    at_most  value <= limit
    at_least value >= limit
    within   low <= value <= high
    equal    value == limit (numbers, strings, lists of them)
    ======== ==================================================

    NaN fails every bound. A name used again keeps its worst measurement and the count.
    """

    def __init__(self) -> None:
        self.measurements: dict[str, dict[str, Any]] = {}
        self.curves: list[dict[str, Any]] = []

    def __call__(
        self,
        name: str,
        value: Any,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        within: tuple[float, float] | None = None,
        equal: Any = None,
        because: str,
        unit: str = "",
    ) -> None:
        """Record ``value`` beside its bound, then raise CheckFailed unless the bound holds.

        Raises:
            CheckFailed: the bound does not hold.
            ValueError: not exactly one bound, a bound that cannot fail, no reason, or a value
                that is not one number, string or list.
        """
        given = {"at_most": at_most, "at_least": at_least, "within": within, "equal": equal}
        bound = {kind: plain(limit) for kind, limit in given.items() if limit is not None}
        if len(bound) != 1 or not because or not name:
            raise ValueError(
                f"check {name!r}: give a name, a reason and exactly one of at_most, at_least, "
                f"within, equal; got bounds {bound} because {because!r}"
            )
        _refuse_a_bound_that_cannot_fail(name, bound)
        measured = plain(value)
        passed = measurement_passes(measured, bound)
        self._keep_worst(
            {
                "name": name,
                "value": measured,
                "bound": bound,
                "because": because,
                "unit": unit,
                "passed": passed,
                "margin": margin(measured, bound),
                "count": 1,
            }
        )
        if not passed:
            kind, limit = next(iter(bound.items()))
            words = f"{kind.replace('_', ' ')} {limit}{' ' + unit if unit else ''}"
            raise CheckFailed(f"{name}: measured {measured}, must be {words} ({because})")

    def series(
        self,
        name: str,
        y: Sequence[float],
        x: Sequence[float] | None = None,
        x_label: str = "update",
        y_label: str = "nats per token",
    ) -> None:
        """Keep a curve for the report; ``x`` counts from 1 when it is left out.

        Raises:
            ValueError: ``x`` and ``y`` differ in length, or there is no point.
        """
        points = [float(value) for value in y]
        places = [float(value) for value in x] if x is not None else list(range(1, len(points) + 1))
        if not points or len(points) != len(places):
            raise ValueError(f"series {name!r}: {len(places)} places for {len(points)} points")
        self.curves.append(
            {"name": name, "x": places, "y": points, "x_label": x_label, "y_label": y_label}
        )

    def _keep_worst(self, new: dict[str, Any]) -> None:
        old = self.measurements.get(new["name"])
        if old is None:
            self.measurements[new["name"]] = new
            return
        count = old["count"] + 1
        worse = (not new["passed"], -_order(new)) >= (not old["passed"], -_order(old))
        self.measurements[new["name"]] = {**(new if worse else old), "count": count}


def _order(measurement: dict[str, Any]) -> float:
    known = measurement["margin"]
    return float("inf") if known is None else float(known)


def _refuse_a_bound_that_cannot_fail(name: str, bound: dict[str, Any]) -> None:
    kind, limit = next(iter(bound.items()))
    if kind == "equal":
        return
    limits: list[Any] = limit if kind == "within" else [limit]
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in limits)
    ordered = kind != "within" or (len(limits) == 2 and numeric and limits[0] <= limits[1])
    if not numeric or not ordered or not all(map(math.isfinite, limits)):
        raise ValueError(f"check {name!r}: {kind}={limit!r} is no bound; give finite numbers")


def plain(value: Any) -> Plain:
    """A value as JSON holds it: number, bool, string, or list of these.

    Raises:
        ValueError: anything else, a tensor of several elements among them.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"a measurement is one number; got a tensor {tuple(value.shape)}")
        value = value.detach().cpu().item()
    if hasattr(value, "item"):  # a NumPy scalar, which may be a subclass of float
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # of a subclass, the plain value
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    raise ValueError(f"a measurement is a number, a string or a list; got {type(value).__name__}")
