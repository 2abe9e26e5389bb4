"""The files that people and CI servers read, rendered from ``evidence.jsonl`` and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from harness import formatting
from harness.chain import encode
from harness.evidence import EvidenceError, read
from harness.groups import Record, distinct, tightest
from harness.headline import headline
from harness.junit import junit_xml
from harness.markdown import summary_markdown
from harness.plots import alternative, figure_svg, num_not_finite
from harness.verdict import is_as_required, outcome, place
from harness.view import Report

REPORT_FILE = "report.json"


def render(directory: Path | str) -> Path:
    """Write report.html, summary.md, junit.xml and report.json; return the HTML's path.

    Each file is replaced as a whole or left as it was. ``report.json`` comes last: it holds the
    hashes of the others and the number of lines and last hash of the evidence.

    Raises:
        EvidenceError: no sound evidence, evidence that an older report.json contradicts, or a
            folder that cannot be written to.
    """
    folder = Path(directory)
    records = read(folder)
    _refuse_shortened_evidence(folder, records)
    report = Report(records)
    files = {
        "report.html": report_html(report).encode(errors="replace"),
        "summary.md": summary_markdown(report).encode(errors="replace"),
        "junit.xml": junit_xml(report),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files[REPORT_FILE] = _json_bytes({**report_json(report), "files": hashes})
    for name, data in files.items():
        _replace(folder / name, data)
    return folder / "report.html"


def report_json(report: Report) -> dict[str, Any]:
    """What ``report.json`` says, without the hashes of the files beside it.

    Exact values; floats that JSON cannot hold as in the evidence. Curves are left out.
    """
    return {
        "format": 1,
        "evidence": {"num_lines": len(report.lines), "head": report.lines[-1]["hash"]},
        "verdict": report.verdict,
        "sentence": headline(report),
        "problems": report.problems,
        "simulated": report.simulated,
        "on_trial": report.on_trial,
        "run": _without(report.run, "index", "previous", "hash", "kind"),
        "end": _without(report.end, "index", "previous", "hash", "kind"),
        "selection": _without(report.selection, "index", "previous", "hash", "kind"),
        "milestones": {milestone.name: milestone.state for milestone in report.milestones},
        "records": [
            {**_without(record, "series"), "outcome": outcome(record), "device": report.device}
            for record in report.records
        ],
    }


def report_html(report: Report) -> str:
    """The page: one file that refers to nothing outside it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=formatting.number,
        share=formatting.share,
        duration=formatting.duration,
        text=formatting.text_of,
        slug=_slug,
        breakable=_breakable,
    )
    environment.globals.update(
        measured=formatting.measured,
        amount=formatting.amount,
        bar=bar,
        distinct=distinct,
        is_as_required=is_as_required,
        outcome=outcome,
        place=place,
        tightest=tightest,
    )
    page = environment.get_template("report.html.jinja")
    return page.render(report=report, headline=headline(report), figures=_figures(report))


def bar(margin: float | None) -> dict[str, Any] | None:
    """How a margin is drawn: the used share of the track in percent, and whether it overflows."""
    if margin is None:
        return None
    used = 100 * (1 - margin)
    return {"used": round(min(max(used, 0.0), 100.0), 2), "over": margin < 0}


def _figures(report: Report) -> list[dict[str, Any]]:
    figures = []
    for number, (record, curves) in enumerate(report.series):
        figures.append(
            {
                "record": record,
                "svg": figure_svg(curves, f"plot{number}"),
                "alternative": alternative(curves),
                "not_drawn": sum(map(num_not_finite, curves)),
            }
        )
    return figures


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)


def _breakable(name: str) -> Markup:
    """A name that may go on in the next line after ``::`` and ``_``."""
    return Markup(re.sub(r"(::|_)", r"\1<wbr>", str(escape(name))))


def _without(record: Record, *names: str) -> Record:
    return {key: value for key, value in record.items() if key not in names}


def _json_bytes(value: dict[str, Any]) -> bytes:
    return json.dumps(encode(value), indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _refuse_shortened_evidence(folder: Path, records: Sequence[Record]) -> None:
    """A new report must not cover up that lines were cut off since the last one."""
    try:
        known = json.loads((folder / REPORT_FILE).read_bytes())["evidence"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"{folder / REPORT_FILE} cannot be read ({error}); run `python -m harness verify "
            f"{folder}`, and remove the file to render again"
        ) from error
    if known != {"num_lines": len(records), "head": records[-1]["hash"]}:
        raise EvidenceError(
            f"{folder / REPORT_FILE} was written from other evidence; run `python -m harness "
            f"verify {folder}`"
        )


def _replace(path: Path, data: bytes) -> None:
    """Write a file beside ``path`` and move it there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EvidenceError(f"cannot write {path}: {error.strerror or error}") from error
