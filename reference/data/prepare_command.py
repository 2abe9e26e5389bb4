"""The command `python -m reference.data`: make a folder of shards, and look into one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from reference.data.clean import CleanSettings
from reference.data.inspection import draw, tables
from reference.data.manifest import Manifest, read_manifest
from reference.data.near_duplicates import KEEP, DuplicateSettings
from reference.data.policy import CHOICES, PackingPolicy
from reference.data.prepare import PrepareSettings, preparation_key, prepare
from reference.data.remarks import changed_probes, remarks, warnings
from reference.data.sources import parse_sources
from reference.data.text_files import PART_BYTES
from reference.data.token_account import account_table, disagreements, token_accounts
from reference.data.tokenizing import parse_tokenizer
from reference.data.visible import visible
from reference.data.work import goes_on, leftovers, work_folder
from reference.options import whole_number

DEFAULT_WINDOW_TOKENS = 1024
WIDTH_WITHOUT_TERMINAL = 160
POLICY = {
    "attention": "a token sees what stands before it within its document, or across all that the "
    "window has",
    "eos": "predict the token that ends a document, or ignore it: it is no target",
    "boundary": "ignore a document's first token as a target, or predict it from the document "
    "before",
    "tail": "a last window that is not full: drop it, pad it, or wrap, which fills it with tokens "
    "from the beginning, trained on twice",
    "positions": "restart at 0 with each document, or continue through the window",
}
UNITS = {
    "read": "bytes",
    "duplicates": "documents",
    "tokenizer": "",
    "tokenize": "documents",
    "shards": "",
    "check": "tokens",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a folder could not be written, or its tokens do not add up; 130 or 143 if a signal
    stopped it; SystemExit with 2 for bad input.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.command == "inspect":
            return _inspect(options)
        _prepare(options)
    except ValueError as error:
        parser.error(_said(str(error), error))
    except BrokenPipeError:
        raise  # nobody reads on: `pipes.py`
    except (OSError, RuntimeError) as error:
        print(f"error: {_said(str(error), error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(_said("stopped", error), file=sys.stderr)
        return 143 if error.args else 130
    return 0


def _said(text: str, error: BaseException) -> str:
    """The text with the notes of the error."""
    return visible("; ".join([text, *getattr(error, "__notes__", [])]), "\n")


def _interrupt(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: to its child, to the group
    raise KeyboardInterrupt(number)


def _prepare(options: argparse.Namespace) -> None:
    policy = PackingPolicy(
        options.window_tokens, **{name: getattr(options, name) for name in CHOICES}
    )
    settings = PrepareSettings(
        policy=policy,
        tokenizer=options.tokenizer,
        validation_fraction=options.validation_fraction,
        seed=options.seed,
        clean=CleanSettings(refuse_invalid=options.refuse_invalid_utf8),
        duplicates=DuplicateSettings(
            threshold=options.near_duplicate_threshold, keep=options.near_duplicates
        ),
        check_contamination=not options.skip_contamination,
    )
    sources = parse_sources(options.sources)
    key = preparation_key(sources, settings)
    for folder in leftovers(options.out.absolute(), key):
        print(f"note: {folder} is left of an unfinished preparation that this one does not go on "
              "with; remove it if nobody needs it", file=sys.stderr)  # fmt: skip
    try:
        with _shown() as progress:
            manifest = prepare(sources, options.out, settings, options.workers, progress)
    except BaseException as error:
        work = work_folder(options.out.absolute(), key)
        if goes_on(error) and work.exists() and not options.out.exists():
            error.add_note(
                f"what was done is kept in {work}: the same command goes on there, also with "
                f"another packing policy"
            )
        raise
    _console().print(tables(manifest)[0])
    print(visible(_summary(manifest, options.out, options.tokenizer), "\n"))
    for warning in warnings(manifest):
        print(f"warning: {visible(warning)}", file=sys.stderr)


def _console() -> Console:
    """Wide where nobody has said how wide; names may hold brackets."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, markup=False)


def _summary(manifest: Manifest, directory: Path, tokenizer: str) -> str:
    found = manifest.contamination
    lines = [f"{directory}: {sum(s.num_tokens for s in manifest.shards):,} tokens"]
    lines += remarks(manifest)
    size, asked = manifest.tokenizer.vocabulary_size, parse_tokenizer(tokenizer).size
    if size < asked:
        lines.append(f"the BPE has {size:,} tokens, not {asked:,}: the text has no more pairs")
    if found["status"] == "complete":
        lines.append(
            f"validation against training: {found['num_shared_documents']} documents shared, "
            f"{found['num_overlapping_documents']} of {found['num_validation_documents']} with "
            f"{found['threshold']:.0%} or more of their {found['ngram_words']}-grams"
        )
    else:
        lines.append("contamination not checked: nothing can be trained on this folder")
    if changed := changed_probes(manifest):
        lines.append(f"the tokenizer changes text on trial: {', '.join(changed)}")
    return "\n".join(lines)


def _inspect(options: argparse.Namespace) -> int:
    if options.drawing and not options.drawing.absolute().parent.is_dir():
        raise ValueError(f"no folder {options.drawing.absolute().parent} to draw into")
    manifest = read_manifest(options.directory)
    console = _console()
    accounts = token_accounts(manifest, options.directory)
    for table in (*tables(manifest, options.directory, options.windows), account_table(accounts)):
        console.print(table)
    for text in (*remarks(manifest), *(f"warning: {one}" for one in warnings(manifest))):
        print(visible(text))
    if options.drawing:
        draw(manifest, options.directory, options.drawing)
        print(f"drawn: {options.drawing}")
    wrong = disagreements(accounts)
    for text in wrong:
        print(f"error: {visible(text)}", file=sys.stderr)
    return 1 if wrong else 0


class _Shown:
    """The stages as bars without an end: how much there will be is known at the end only."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, object] = {}

    def __call__(self, stage: str, num_done: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=None, unit=UNITS[stage])
        self._bars.advance(self._tasks[stage], num_done)  # type: ignore[arg-type]


@contextmanager
def _shown() -> Iterator[_Shown]:
    console = Console(stderr=True)
    columns = ("{task.description:<10}", "{task.completed:>15,.0f} {task.fields[unit]}")
    bars = Progress(
        TextColumn(columns[0]), BarColumn(20), TextColumn(columns[1]), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with bars:
        yield _Shown(bars)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reference.data", description=main.__doc__)
    parser.description = "Documents to shards with a manifest, and a look into them."
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="make DIR from sources")
    defaults = PrepareSettings(PackingPolicy(DEFAULT_WINDOW_TOKENS))
    add = make.add_argument
    add("sources", nargs="+", metavar="SOURCE",
        help="a file or folder (text, .jsonl, .parquet, .arrow; .gz and .zst of them; of a folder "
        "no hidden files), a text file being one document, or if it has more than "
        f"{defaults.clean.max_document_bytes // 2**20} MiB several of at most "
        f"{PART_BYTES // 2**10} KiB, cut at line ends; "
        "datasets:NAME_OR_PATH, language, python-docs or python-library; options follow a question "
        "mark, joined by &: name, weight, licence, field, slice, only (endings of files), and for "
        "datasets: config, split, revision, data_files")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="appears when it is complete")
    add("--tokenizer", default=defaults.tokenizer, metavar="bytes|characters|bpe:N|FILE[?eos=ID]",
        help=f"({defaults.tokenizer})")  # fmt: skip
    add("--validation-fraction", type=float, default=defaults.validation_fraction, metavar="F",
        help="of the clusters, held out (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the split")
    add("--workers", type=whole_number, default=1, metavar="N", help="processes; same result")
    add("--near-duplicate-threshold", type=float, default=defaults.duplicates.threshold,
        metavar="J", help="Jaccard similarity of runs of words (%(default)s)")  # fmt: skip
    add("--near-duplicates", choices=KEEP, default=defaults.duplicates.keep,
        help="how many of those that are alike stay (%(default)s)")  # fmt: skip
    add("--refuse-invalid-utf8", action="store_true", help="stop at it; else it is dropped")
    add("--skip-contamination", action="store_true",
        help="leave the check unfinished; training refuses the folder")  # fmt: skip
    add("--window-tokens", type=whole_number, default=DEFAULT_WINDOW_TOKENS, metavar="T",
        help="inputs of a window (%(default)s)")  # fmt: skip
    for name, value in asdict(defaults.policy).items():
        if name in CHOICES:
            add(f"--{name}", choices=CHOICES[name], default=value,
                help=f"{POLICY[name]} (%(default)s)")  # fmt: skip
    look = commands.add_parser(
        "inspect", help="print and draw what is in DIR; 1 if its tokens do not add up"
    )
    look.add_argument("directory", type=Path, metavar="DIR")
    look.add_argument("--windows", type=_number, default=3, metavar="N", help="windows shown")
    look.add_argument("--drawing", type=Path, metavar="FILE.png", help="draw it, too")
    return parser
