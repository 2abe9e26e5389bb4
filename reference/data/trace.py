"""Which documents an update of a run was made of, and why: `python -m reference.data.trace DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from reference.data.folder_text import FolderText, open_folder
from reference.data.loader import Loader, Sampled
from reference.data.pipes import ended
from reference.data.text_files import place_of
from reference.data.visible import visible
from reference.data.windows import Piece
from reference.options import whole_number

HASH_CHARACTERS = 12  # of a SHA-256, enough to find the document


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows of one update of `python -m reference.train --data DIR --seed S`.

    SystemExit with 2 for a folder that is none.
    """
    from reference.stack import ROLES

    parser = argparse.ArgumentParser(
        prog="python -m reference.data.trace",
        description="Which documents an update of a run was made of, and why. Updates, rows, "
        "windows, epochs and tokens count from 1; row in the tables of the shards counts from 0.",
    )
    parser.add_argument("data", type=Path, metavar="DIR", help="a prepared folder")
    parser.add_argument("--update", type=whole_number, required=True, metavar="N", help="from 1 on")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    options = parser.parse_args(arguments)
    try:
        text = open_folder(options.data, SimpleNamespace(**ROLES))
        loader = text.windows(options.seed, options.update)
    except ValueError as error:
        parser.error(visible(str(error), "\n"))
    for line in lines(text, loader, options.update):
        print(visible(line))
    return 0


def lines(text: FolderText, loader: Loader, update: int) -> list[str]:
    """For each row of an update a line, and one for each document in it. Updates, rows, windows,
    epochs and tokens count from 1.
    """
    size = loader.settings.rows_per_update
    said = []
    for place in range((update - 1) * size, update * size):
        sampled = loader.sampled(place)
        said.append(_row(text, place, sampled))
        said += [_piece(piece) for piece in text.training.locate(sampled.window)]
    return said


def _row(text: FolderText, place: int, sampled: Sampled) -> str:
    source = text.manifest.sources[text.training.sources[sampled.source]]
    targets = int(text.training.targets[sampled.source][_number_in_source(text, sampled)])
    kind = "of its size" if source.weight is None else "declared"
    return (
        f"row {place + 1:,}: window {sampled.window + 1:,}, {targets:,} targets, because "
        f"{source.name} has {sampled.share:.2%} of them ({kind}); its epoch {sampled.epoch + 1:,}"
    )


def _number_in_source(text: FolderText, sampled: Sampled) -> int:
    return sampled.window - text.training.first_windows[sampled.source]


def _piece(piece: Piece) -> str:
    document = piece.document
    stop = piece.first_token + piece.stop - piece.start
    steps = ", ".join(document.steps) or "nothing"
    return (
        f"    {piece.start + 1} to {piece.stop} {document.split}: tokens {piece.first_token + 1:,} "
        f"to {stop:,} of {document.num_tokens:,} of {place_of(document.file, document.row)}, "
        f"{document.slice}, sha256 "
        f"{document.sha256[:HASH_CHARACTERS]}, cluster {document.cluster[:HASH_CHARACTERS]} of "
        f"{document.cluster_size:,}; cleaning did {steps}{' (again)' if piece.is_again else ''}"
    )


if __name__ == "__main__":
    sys.exit(ended(main))
