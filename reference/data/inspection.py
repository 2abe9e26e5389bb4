"""What is in a folder of shards, as tables and as one drawing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text

from reference.data.batches import shuffle
from reference.data.clean import REASONS
from reference.data.manifest import (
    SPLITS,
    TOKENIZER,
    TRAIN,
    Manifest,
    SliceRecord,
    SourceRecord,
)
from reference.data.open_tokenizer import open_tokenizer
from reference.data.order import Interleaving
from reference.data.remarks import decoded_differently
from reference.data.shards import open_documents
from reference.data.text_files import place_of
from reference.data.visible import visible
from reference.data.windows import SplitWindows

NUM_PHASES = 20
SHOWN_CHARACTERS = 600
WRITTEN = "what is written"
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


def tables(
    manifest: Manifest, directory: Path | str | None = None, num_windows: int = 0
) -> list[Table]:
    """Sources and what became of their documents first. With a directory also lengths, mixing, and
    the first windows decoded, the boundaries of documents marked.
    """
    found = [_sources(manifest), _slices(manifest), _steps(manifest)]
    if directory is None:
        return found
    windows = SplitWindows(directory, manifest, TRAIN)
    found += [_lengths(manifest, directory), _mixing(manifest, windows)]
    if num_windows:
        found.append(_decoded(manifest, directory, windows, num_windows))
    return found


def draw(manifest: Manifest, directory: Path | str, file: Path) -> None:
    """One picture: lengths of documents, tokens per byte, duplicates, mixing by phase.

    The ending of `file` chooses the format (.png, .svg, .pdf). Raises ValueError for one that
    matplotlib cannot write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 7), layout="constrained")
    lengths, density, dropped, mixing = figure.subplots(2, 2).flat
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": 7}  # not on the data
    for split in SPLITS:
        own = np.maximum(_num_tokens(manifest, directory, split), 1)
        bins = np.geomspace(1, max(own.max() + 1, 2), 40)
        lengths.hist(
            own, bins, histtype="step", label=split, weights=np.full(len(own), 1 / len(own))
        )
    lengths.set(xscale="log", xlabel="tokens of a document", title="lengths, share of documents")
    lengths.yaxis.set_major_formatter(PercentFormatter(1.0))
    lengths.legend(**beside)
    slices = manifest.slices
    values = [_per_byte(s.num_tokens - s.num_documents, s.num_bytes) for s in slices]
    density.barh(range(len(slices)), values)  # by place: equal labels would be one bar
    density.set_yticks(range(len(slices)), [_drawn(_label(manifest, one)) for one in slices])
    density.set(title="tokens per byte, without EOS")
    density.tick_params("y", labelsize=7)
    names = [_drawn(source.name) for source in manifest.sources]
    left = np.zeros(len(names))
    for reason in _reasons(manifest):
        counts = [source.dropped.get(reason) for source in manifest.sources]
        share = [
            count.num_bytes / max(source.num_bytes, 1) if count else 0.0
            for count, source in zip(counts, manifest.sources, strict=True)
        ]
        dropped.barh(range(len(names)), share, left=left, label=reason)
        left += share
    dropped.set_yticks(range(len(names)), names)
    dropped.xaxis.set_major_formatter(PercentFormatter(1.0))
    dropped.set(title="bytes dropped, share of the source", xlim=(0, max(left.max() * 1.1, 0.01)))
    if left.any():
        dropped.legend(**beside)
    mixed = _mixed(manifest, SplitWindows(directory, manifest, TRAIN))
    part = 100 * np.arange(len(mixed.phases) + 1) / len(mixed.phases)
    steps = np.vstack([mixed.phases, mixed.phases[-1:]]).T
    labels = [_drawn(_weighted(manifest, source)) for source in range(len(names))]
    mixing.stackplot(part, steps, labels=labels, step="post")
    mixing.set(
        title="supervised tokens by source", xlabel="part of an epoch, %", ylim=(0, 1),
        xlim=(0, 100),
    )  # fmt: skip
    mixing.yaxis.set_major_formatter(PercentFormatter(1.0))
    mixing.legend(**beside)
    try:
        figure.savefig(file, dpi=130)
    except ValueError as error:
        raise ValueError(f"cannot draw {file}: {error}") from error


def _sources(manifest: Manifest) -> Table:
    heads = ("source", "kind", "licence", "weight", "documents", "bytes")
    table = _table(*heads, title="sources")
    reasons = _reasons(manifest)
    for reason in reasons:
        table.add_column(reason, justify="right", overflow="fold")
    for split in SPLITS:
        table.add_column(f"{split} tokens", justify="right", overflow="fold")
    for number, source in enumerate(manifest.sources):
        counts = [source.dropped.get(reason) for reason in reasons]
        shards = [shard for shard in manifest.shards if shard.source == number]
        weight = _weight(source)
        _add(
            table,
            source.name, source.kind, source.licence or "not stated", weight,
            f"{source.num_documents:,}", f"{source.num_bytes:,}",
            *(f"{count.num_documents:,}" if count else "" for count in counts),
            *(f"{sum(s.num_tokens for s in shards if s.split == split):,}" for split in SPLITS),
        )  # fmt: skip
    return table


def _slices(manifest: Manifest) -> Table:
    heads = ["split", "source", "slice", "documents", "tokens", "bytes", "tokens per byte"]
    changed = decoded_differently(manifest)
    table = _table(*heads, *(["changed by the tokenizer"] if changed else []), title=WRITTEN)
    for one in manifest.slices:
        density = _per_byte(one.num_tokens - one.num_documents, one.num_bytes)
        _add(
            table,
            one.split, _name(manifest, one.source), one.slice, f"{one.num_documents:,}",
            f"{one.num_tokens:,}", f"{one.num_bytes:,}", f"{density:.4f}",
            *([f"{changed.get((one.split, one.source, one.slice), 0):,}"] if changed else []),
        )  # fmt: skip
    return table


def _steps(manifest: Manifest) -> Table:
    table = _table("step", "with", "found", title="steps, and the check")
    for step in manifest.steps:
        results = manifest.contamination if step.name == "contamination" else step.results
        _add(table, step.name, _words(step.parameters), _words(results))
    tokenizer, policy = manifest.tokenizer, manifest.policy
    _add(table, "ids", tokenizer.id_dtype, f"{tokenizer.vocabulary_size} tokens")
    _add(table, "packing", _words(policy), "")
    return table


def _lengths(manifest: Manifest, directory: Path | str) -> Table:
    heads = [f"{share:.0%}" for share in SHARES]
    table = _table("split", *heads, title="tokens of a document, at these shares of documents")
    for split in SPLITS:
        values = np.quantile(_num_tokens(manifest, directory, split), SHARES)
        _add(table, split, *(f"{value:,.0f}" for value in values))
    return table


def _mixing(manifest: Manifest, windows: SplitWindows) -> Table:
    mixed = _mixed(manifest, windows)
    names = [source.name for source in manifest.sources]
    table = _table("part of an epoch", *names, title="share of the supervised tokens")
    num_phases = len(mixed.phases)
    for number, row in enumerate(mixed.phases):
        _add(
            table,
            f"{number / num_phases:.0%} to {(number + 1) / num_phases:.0%}",
            *(f"{share:.2%}" for share in row),
        )
    table.add_section()
    _add(table, "times each is gone through", *(f"{times:.2f}" for times in mixed.times))
    return table


def _decoded(
    manifest: Manifest, directory: Path | str, windows: SplitWindows, num_windows: int
) -> Table:
    tokenizer = open_tokenizer(Path(directory) / TOKENIZER, manifest.tokenizer.eos)
    table = _table("window", "tokens", "document", "text", title="windows")
    table.show_lines = True
    step = max(windows.num_windows // num_windows, 1)
    for number in range(0, windows.num_windows, step)[:num_windows]:
        tokens = windows.read(torch.tensor([number])).tokens[0]
        for piece in windows.locate(number):
            ids = tokens[piece.start : piece.stop]
            ends = bool(ids[-1] == tokenizer.eos)
            text = tokenizer.decode(ids).decode("utf-8", "replace")
            if len(text) > SHOWN_CHARACTERS:
                text = f"{text[: SHOWN_CHARACTERS // 2]} [...] {text[-SHOWN_CHARACTERS // 2 :]}"
            record = piece.document
            place = place_of(record.file, record.row)
            about = (
                f"{visible(f'{record.source}: {place}')}\nfrom its token {piece.first_token + 1:,}"
            )
            shown = Text(visible(text, "\n\t"))
            if ends:
                shown.append(" <EOS>", style="bold reverse")
            _add(table, f"{number + 1:,}", f"{piece.start + 1} to {piece.stop}", about, shown)
    return table


@dataclass(frozen=True)
class _Mixed:
    """One epoch, which has as many rows as there are. phases: [phases, sources] shares of the
    supervised tokens; times: [sources] how often each source's own are trained on. A source without
    windows has 0.
    """

    phases: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]


def _mixed(manifest: Manifest, windows: SplitWindows) -> _Mixed:
    chosen = [manifest.sources[source].weight for source in windows.sources]
    weights = [weight for weight in chosen if weight is not None]
    order = Interleaving(windows.targets, weights or None, manifest.seed, shuffle)
    rows = order.rows(0, order.rows_per_epoch).numpy()
    parts = np.array_split(rows, min(NUM_PHASES, len(rows)))
    consumed = np.zeros((len(parts), len(manifest.sources)))
    totals = np.ones(len(manifest.sources))
    for place, (source, targets) in enumerate(zip(windows.sources, windows.targets, strict=True)):
        totals[source] = int(targets.sum())
        for number, part in enumerate(parts):
            consumed[number, source] = targets.numpy()[part[part[:, 0] == place, 2]].sum()
    shares = consumed / np.maximum(consumed.sum(1, keepdims=True), 1)
    return _Mixed(shares, consumed.sum(0) / totals)


def _table(*heads: str, title: str) -> Table:
    """Text that is too wide goes on in the next line: numbers are never cut."""
    table = Table(title=title)
    for head in heads:
        table.add_column(visible(head), overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row; what data brings into it is made visible, but for the ends of lines."""
    table.add_row(*(visible(cell, "\n") if isinstance(cell, str) else cell for cell in cells))


def _num_tokens(manifest: Manifest, directory: Path | str, split: str) -> npt.NDArray[Any]:
    parts = [
        open_documents(directory, shard)["num_tokens"].to_numpy()
        for shard in manifest.shards_of(split)
    ]
    return np.concatenate(parts)


def _weight(source: SourceRecord) -> str:
    return "its size" if source.weight is None else f"{source.weight:g}"


def _weighted(manifest: Manifest, source: int) -> str:
    record = manifest.sources[source]
    return f"{record.name}, weight {_weight(record)}"


def _label(manifest: Manifest, one: SliceRecord) -> str:
    """Source, slice and split; a slice that is called as its source once."""
    name = _name(manifest, one.source)
    return f"{name} {one.split}" if one.slice == name else f"{name} {one.slice} {one.split}"


def _drawn(name: str) -> str:
    """The name as matplotlib draws it, to which dollars mean a formula."""
    return visible(name).replace("$", r"\$")


def _name(manifest: Manifest, source: int) -> str:
    return manifest.sources[source].name


def _reasons(manifest: Manifest) -> list[str]:
    """Those for which something was dropped."""
    return [r for r in REASONS if any(r in source.dropped for source in manifest.sources)]


def _per_byte(num_tokens: int, num_bytes: int) -> float:
    return num_tokens / max(num_bytes, 1)


def _words(values: dict[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{visible(name)}:", _words(value, f"{indent}  ")]
        elif not isinstance(value, (dict, list)):
            lines.append(visible(f"{indent}{name}: {value}"))
    return "\n".join(lines)
