"""Curves as SVG text that stands inside an HTML page: no file, no font, no address outside it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MAX_POINTS = 480
SIZE_IN = (4.6, 2.9)  # as wide as a phone, so that 10 pt stay 10 pt
INK, FAINT = "#1c2326", "#d5d8d6"
# Okabe and Ito 2008, darkened where thin lines on white need it: told apart by most eyes.
COLOURS = ("#0b5c8a", "#c2410c", "#00735a", "#8f4d7d", "#8a6100", "#1c2326")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "touchstone",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.formatter.useoffset": False,
    "path.simplify": False,
    "text.parse_math": False,  # names are plain text
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def figure_svg(curves: Sequence[dict[str, Any]], identity: str) -> str:
    """The curves of one pair of axes as an ``<svg>`` element.

    Args:
        curves: series as evidence holds them: name, x, y, x_label, y_label.
        identity: put before every id in the SVG, so that several stand in one page.
    """
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for place, curve in enumerate(curves):
            _draw(axes, curve, place)
        _dress(axes, curves)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    return _inline(text.getvalue(), identity, alternative(curves))


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most ``MAX_POINTS`` points: of every stretch its lowest and its highest, in order.

    Peaks survive. Points that are not finite become gaps.
    """
    finite = [(a, b if math.isfinite(b) else math.nan) for a, b in zip(x, y, strict=True)]
    if len(finite) <= MAX_POINTS:
        return [a for a, _ in finite], [b for _, b in finite]
    num_stretches = MAX_POINTS // 2 - 1
    width = len(finite) / num_stretches
    kept = {0, len(finite) - 1}
    for stretch in range(num_stretches):
        places = range(int(stretch * width), int((stretch + 1) * width))
        known = [place for place in places if not math.isnan(finite[place][1])]
        if known:
            kept.add(min(known, key=lambda place: finite[place][1]))
            kept.add(max(known, key=lambda place: finite[place][1]))
        else:
            kept.add(places[0])
    chosen = [finite[place] for place in sorted(kept)]
    return [a for a, _ in chosen], [b for _, b in chosen]


def num_not_finite(curve: dict[str, Any]) -> int:
    """How many points of a curve cannot be drawn."""
    return sum(not math.isfinite(value) for value in curve["y"])


def alternative(curves: Sequence[dict[str, Any]]) -> str:
    """One sentence for those who do not see the plot."""
    told = []
    for curve in curves:
        finite = [value for value in curve["y"] if math.isfinite(value)]
        path = f"from {finite[0]:.4g} to {finite[-1]:.4g}" if finite else "without a finite value"
        told.append(f"{curve['name']}: {len(curve['y'])} points, {path}")
    return f"{curves[0]['y_label']} against {curves[0]['x_label']}. {'; '.join(told)}."


def _draw(axes: Axes, curve: dict[str, Any], place: int) -> None:
    x, y = thin(curve["x"], curve["y"])
    axes.plot(
        x,
        y,
        color=COLOURS[place % len(COLOURS)],
        linestyle=STYLES[place % len(STYLES)],
        linewidth=1.3,
        marker="o" if len(x) <= 12 else None,
        markersize=3,
        label=curve["name"],
    )


def _dress(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    axes.set_xlabel(curves[0]["x_label"])
    axes.set_ylabel(curves[0]["y_label"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.7)
    axes.margins(x=0.02)
    values = [v for curve in curves for v in curve["y"] if math.isfinite(v)]
    places = [v for curve in curves for v in curve["x"]]
    if all(float(v).is_integer() for v in places):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if values and min(values) > 0 and max(values) / min(values) > 200:
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=10, handlelength=2.2)


def _inline(svg: str, identity: str, title: str) -> str:
    body = svg[svg.index("<svg") :]
    opening, rest = body.split(">", 1)
    view = re.search(r'viewBox="([^"]+)"', opening)
    box = view[1] if view else "0 0 331 209"
    rest = re.sub(r'\bid="', f'id="{identity}-', rest)
    rest = rest.replace("url(#", f"url(#{identity}-").replace('href="#', f'href="#{identity}-')
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg class="plot" role="img" aria-label="{label}" viewBox="{box}">{rest}'
