"""Numbers and bounds as a reader wants them; the exact ones stand in ``report.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DIGITS = 4
LONGEST_TEXT = 72
TIMES = "\N{MULTIPLICATION SIGN}"
SYMBOLS = {"at_most": "≤", "at_least": "≥", "within": "in", "equal": "="}


def number(value: float | int, digits: int = DIGITS) -> str:
    """Integers exact with separators; floats to ``digits`` significant digits, 1e-12 short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}infinity"
    if value.is_integer() and abs(value) < 1e6:
        return number(int(value))
    power = math.floor(math.log10(abs(value)))
    if -4 < power < 6:
        text = f"{value:,.{max(digits - 1 - power, 0)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    return text


def text_of(value: Any) -> str:
    """A measured value of any kind, shortened."""
    if isinstance(value, (bool, int, float)):
        return number(value)
    if isinstance(value, (list, tuple)):
        return _list(value)
    return _short(str(value))


def measured(value: Any, bound: Mapping[str, Any]) -> tuple[str, str]:
    """The texts of a value and of its bound.

    Both show as many digits as it takes to tell them apart: 0.0200001 is not shown as 0.02 under
    "≤ 0.02", and a narrow interval around c is shown as c ± half its width, its value as c + rest.
    """
    ((kind, limit),) = bound.items()
    symbol = SYMBOLS[kind]
    if kind == "within":
        return _inside(value, float(limit[0]), float(limit[1]))
    value_text, limit_text = text_of(value), text_of(limit)
    if value_text == limit_text and value != limit:
        if isinstance(value, (list, tuple)) and isinstance(limit, (list, tuple)):
            value_text, limit_text = _first_difference(value, limit)
        else:
            value_text, limit_text = _exact(value), _exact(limit)
    return value_text, f"{symbol} {limit_text}"


def share(margin: float | None) -> str:
    """The margin in words: "88 % left", or how many times the bound was passed."""
    if margin is None:
        return "exact"
    if margin < 0:
        times = 1 - margin
        return f"{number(times, 3)} {TIMES} the bound" if times >= 1.05 else "just past the bound"
    if margin > 0.99:
        return "> 99 % left"
    if margin < 0.001:
        return "< 0.1 % left" if margin else "at the bound"
    percent = 100 * margin
    return f"{percent:.1f} % left" if percent < 10 else f"{percent:.0f} % left"


def duration(seconds: float) -> str:
    """0.12 s, 7.5 s, 3 min 05 s, 2 h 11 min."""
    if seconds < 60:
        return f"{number(seconds, 2)} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def amount(count: int, noun: str) -> str:
    """1 gate, 2 gates."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listing(names: list[str]) -> str:
    """a, b and c."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def _inside(value: Any, low: float, high: float) -> tuple[str, str]:
    centre, half = (low + high) / 2, (high - low) / 2
    if not isinstance(value, (int, float)) or not 0 < half < 1e-3 * abs(centre):
        return text_of(value), f"in {number(low)} … {number(high)}"
    bound = f"in {number(centre)} ± {number(half, 3)}"
    rest = float(value) - centre
    if not abs(rest) < 1e-3 * abs(centre):
        return number(value), bound
    sign = "+" if rest > 0 else "-"
    tail = f" {sign} {number(abs(rest), 3)}" if rest else ""
    return number(centre) + tail, bound


def _exact(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _list(values: list[Any] | tuple[Any, ...]) -> str:
    text = "[" + ", ".join(text_of(value) for value in values) + "]"
    if len(text) <= LONGEST_TEXT:
        return text
    head = ", ".join(text_of(value) for value in values[:4])
    return _short(f"[{head}, …") + f"] ({len(values)} entries)"


def _first_difference(value: Any, limit: Any) -> tuple[str, str]:
    if len(value) != len(limit):
        return f"{len(value)} entries", f"{len(limit)} entries"
    place = next(i for i, pair in enumerate(zip(value, limit, strict=True)) if pair[0] != pair[1])
    return f"entry {place}: {text_of(value[place])}", f"entry {place}: {text_of(limit[place])}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
