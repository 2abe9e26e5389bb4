"""What is in a folder of shards, as tables and as one drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text

from reference.data.clean import REASONS
from reference.data.manifest import (
    SPLITS,
    TOKENIZER,
    TRAIN,
    Manifest,
    SliceRecord,
)
from reference.data.mixing import draw_mixing, mixing_table, weight_text
from reference.data.open_tokenizer import open_tokenizer
from reference.data.remarks import decoded_differently
from reference.data.screen_table import add_row, screen_table
from reference.data.shards import open_documents
from reference.data.text_files import place_of
from reference.data.visible import drawable, visible
from reference.data.windows import SplitWindows

SHOWN_CHARACTERS = 600
WRITTEN = "what is written"
COUNTED = "rows, windows and tokens count from 1 here; row in the tables of the shards from 0"
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
    found += [_lengths(manifest, directory), mixing_table(manifest, windows)]
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
    density.set_yticks(range(len(slices)), [drawable(_label(manifest, one)) for one in slices])
    density.set(title="tokens per byte, without EOS")
    density.tick_params("y", labelsize=7)
    names = [drawable(source.name) for source in manifest.sources]
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
    draw_mixing(mixing, manifest, SplitWindows(directory, manifest, TRAIN))
    mixing.yaxis.set_major_formatter(PercentFormatter(1.0))
    mixing.legend(**beside)
    try:
        figure.savefig(file, dpi=130)
    except ValueError as error:
        raise ValueError(f"cannot draw {file}: {error}") from error


def _sources(manifest: Manifest) -> Table:
    heads = ("source", "kind", "licence", "weight", "documents", "bytes")
    table = screen_table(*heads, title="sources")
    reasons = _reasons(manifest)
    for reason in reasons:
        table.add_column(reason, justify="right", overflow="fold")
    for split in SPLITS:
        table.add_column(f"{split} tokens", justify="right", overflow="fold")
    for number, source in enumerate(manifest.sources):
        counts = [source.dropped.get(reason) for reason in reasons]
        shards = [shard for shard in manifest.shards if shard.source == number]
        weight = weight_text(source)
        add_row(
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
    table = screen_table(*heads, *(["changed by the tokenizer"] if changed else []), title=WRITTEN)
    for one in manifest.slices:
        density = _per_byte(one.num_tokens - one.num_documents, one.num_bytes)
        add_row(
            table,
            one.split, _name(manifest, one.source), one.slice, f"{one.num_documents:,}",
            f"{one.num_tokens:,}", f"{one.num_bytes:,}", f"{density:.4f}",
            *([f"{changed.get((one.split, one.source, one.slice), 0):,}"] if changed else []),
        )  # fmt: skip
    return table


def _steps(manifest: Manifest) -> Table:
    table = screen_table("step", "with", "found", title="steps, and the check")
    for step in manifest.steps:
        results = manifest.contamination if step.name == "contamination" else step.results
        add_row(table, step.name, _words(step.parameters), _words(results))
    tokenizer, policy = manifest.tokenizer, manifest.policy
    add_row(table, "ids", tokenizer.id_dtype, f"{tokenizer.vocabulary_size} tokens")
    add_row(table, "packing", _words(policy), "")
    return table


def _lengths(manifest: Manifest, directory: Path | str) -> Table:
    heads = [f"{share:.0%}" for share in SHARES]
    table = screen_table(
        "split", *heads, title="tokens of a document, at these shares of documents"
    )
    for split in SPLITS:
        values = np.quantile(_num_tokens(manifest, directory, split), SHARES)
        add_row(table, split, *(f"{value:,.0f}" for value in values))
    return table


def _decoded(
    manifest: Manifest, directory: Path | str, windows: SplitWindows, num_windows: int
) -> Table:
    tokenizer = open_tokenizer(Path(directory) / TOKENIZER, manifest.tokenizer.eos)
    table = screen_table("window", "tokens", "document", "text", title="windows")
    table.show_lines = True
    table.caption = COUNTED
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
            add_row(table, f"{number + 1:,}", f"{piece.start + 1} to {piece.stop}", about, shown)
    return table


def _num_tokens(manifest: Manifest, directory: Path | str, split: str) -> npt.NDArray[Any]:
    parts = [
        open_documents(directory, shard)["num_tokens"].to_numpy()
        for shard in manifest.shards_of(split)
    ]
    return np.concatenate(parts)


def _label(manifest: Manifest, one: SliceRecord) -> str:
    """Source, slice and split; a slice that is called as its source once."""
    name = _name(manifest, one.source)
    return f"{name} {one.split}" if one.slice == name else f"{name} {one.slice} {one.split}"


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
