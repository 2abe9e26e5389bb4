"""How fast documents become shards, beside `datasets` and `tokenizers`, and beside datatrove.

    python -m candidates.peers.data_benchmark SOURCE... [--max-bytes N] [--workers 2]
                                              [--datatrove PYTHON] [--at-least 1.0] [--rounds 1]

The sources' documents are first written as JSON lines, one file a worker, which all sides read.

    reference    prepare: exact and near duplicates, split, BPE, token ids, shards, contamination
    datasets     load_dataset, exact duplicates by SHA-256, BPE of the same library from the same
                 number of bytes, `map` to token ids, `map` to windows, save_to_disk
    datatrove    JSON lines to near-duplicate clusters to JSON lines of what stays

The sides take turns, each in a process of its own, so that memory can be told; seconds are of the
wall. Ratios: datasets / reference without its contamination check, which the other side does not
make (it finds no near duplicates either); datatrove / the reference's reading and duplicates; both
together / all of the reference. Exit status 1 if one is below --at-least. PYTHON has datatrove.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reference.data.clean import CleanSettings, clean
from reference.data.policy import PackingPolicy
from reference.data.prepare import PrepareSettings, prepare
from reference.data.sources import Source, chunks, parse_sources, read_chunk
from reference.data.text_files import RawDocument
from reference.data.tokenizing import BPE_BYTES

VOCABULARY, WINDOW_TOKENS = 8192, 1024
MAX_DOCUMENT_BYTES = 16 * 2**20


def documents_of(parsed: list[Source]) -> Iterator[RawDocument]:
    """Every document of the sources, as `prepare` reads them."""
    for chunk in chunks(parsed, MAX_DOCUMENT_BYTES, 0):
        yield from read_chunk(chunk, parsed[chunk.source].fields, MAX_DOCUMENT_BYTES)


def write_lines(sources: list[str], folder: Path, num_files: int, max_bytes: int) -> int:
    """JSON lines of the sources' documents that are text; how many bytes of text."""
    parsed = parse_sources(sources)
    files = [(folder / f"{number}.jsonl").open("w") for number in range(num_files)]
    num_bytes = number = 0
    for document in documents_of(parsed):
        cleaned = clean(document.data, CleanSettings())
        if cleaned.dropped is None:
            row = {"text": cleaned.text.decode(), "id": str(number)}
            files[number % num_files].write(json.dumps(row) + "\n")
            num_bytes += len(cleaned.text)
            number += 1
        if num_bytes >= max_bytes:
            break
    for file in files:
        file.close()
    return num_bytes


def run_reference(lines: Path, out: Path, num_workers: int) -> dict[str, Any]:
    """Seconds of each stage, and what stays."""
    begins: dict[str, float] = {}

    def note(stage: str, num_done: int) -> None:
        begins.setdefault(stage, time.perf_counter())

    begin = time.perf_counter()
    settings = PrepareSettings(PackingPolicy(WINDOW_TOKENS), tokenizer=f"bpe:{VOCABULARY}")
    manifest = prepare(parse_sources([str(lines)]), out, settings, num_workers, note)
    end = time.perf_counter()
    ends = [*list(begins.values())[1:], end]
    stages = {name: stop - start for (name, start), stop in zip(begins.items(), ends, strict=True)}
    return {
        "seconds": end - begin,
        "stages": stages,
        "num_tokens": sum(shard.num_tokens for shard in manifest.shards),
        "num_documents": sum(shard.num_documents for shard in manifest.shards),
    }


def trained_tokenizer(rows: Any) -> Any:
    """Byte-level BPE from the texts of a data set, of at most BPE_BYTES characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total = sum(len(text) for text in rows["text"])
    step = max(-(-total // BPE_BYTES), 1)
    tokenizer.train_from_iterator(
        (batch["text"][::step] for batch in rows.iter(1000)), trainer, length=len(rows)
    )
    return tokenizer


def run_datasets(lines: Path, out: Path, num_workers: int) -> dict[str, Any]:
    """As its users write it: hash, filter, train, map, group, save."""
    import datasets

    datasets.disable_progress_bars()
    begin = time.perf_counter()
    files = sorted(map(str, lines.glob("*.jsonl")))
    rows = datasets.load_dataset(
        "json", data_files=files, split="train", num_proc=num_workers, cache_dir=str(out / "cache")
    )
    rows = rows.map(
        lambda batch: {"sha256": [hashlib.sha256(t.encode()).digest() for t in batch["text"]]},
        batched=True,
        num_proc=num_workers,
    )
    seen: set[bytes] = set()
    kept = [
        i
        for i, name in enumerate(rows["sha256"])
        if name not in seen and not seen.add(name)  # type: ignore[func-returns-value]
    ]
    rows = rows.select(kept)
    read = time.perf_counter()
    tokenizer = trained_tokenizer(rows)
    trained = time.perf_counter()

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*encoding.ids, 0] for encoding in encodings]}

    def group(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        stream = [token for ids in batch["input_ids"] for token in ids]
        stop = len(stream) // WINDOW_TOKENS * WINDOW_TOKENS
        return {"input_ids": [stream[i : i + WINDOW_TOKENS] for i in range(0, stop, WINDOW_TOKENS)]}

    options = {"batched": True, "num_proc": num_workers}
    rows = rows.map(encode, remove_columns=rows.column_names, **options)
    num_tokens = sum(map(len, rows["input_ids"]))
    encoded = time.perf_counter()
    rows.map(group, **options).save_to_disk(str(out / "windows"))
    end = time.perf_counter()
    stages = {"read": read - begin, "tokenizer": trained - read, "tokenize": encoded - trained}
    return {
        "seconds": end - begin,
        "stages": {**stages, "windows": end - encoded},
        "num_tokens": num_tokens,
        "num_documents": len(kept),
    }


SIDES = {"reference": run_reference, "datasets": run_datasets}


def measured(side: str, lines: Path, num_workers: int, python: str | None) -> dict[str, Any]:
    """Runs one side in a process of its own, on an empty folder."""
    with tempfile.TemporaryDirectory(dir=lines.parent) as folder:
        out = Path(folder) / "out"
        if side == "datatrove":
            script = str(Path(__file__).with_name("datatrove_minhash.py"))
            begin = time.perf_counter()
            text, peak = watched([str(python), script, str(lines), str(out), str(num_workers)])
            stays = int(text.split("kept ")[-1].split()[0])
            seconds = time.perf_counter() - begin
            return {"seconds": seconds, "num_documents": stays, "peak_bytes": peak}
        command = [sys.executable, "-m", __spec__.name, "--side", side, str(lines), str(out)]
        text, peak = watched([*command, "--workers", str(num_workers)])
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
        return {**found, "peak_bytes": peak}


def watched(command: list[str]) -> tuple[str, int]:
    """What the command prints, and the most memory that it and all its processes had, looked at
    twice a second: proportional sizes, so that what several share counts once.
    """
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=printed, stderr=errors, start_new_session=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, session_bytes(process.pid))
            time.sleep(0.5)
        for file in (printed, errors):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command[:4])} failed: {errors.read()[-500:]}")
        return printed.read(), peak


def session_bytes(session: int) -> int:
    """The proportional memory of all processes of a session, in bytes (Linux)."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended in the meantime
            if os.getsid(int(folder.name)) == session:
                line = next(
                    line
                    for line in (folder / "smaps_rollup").read_text().splitlines()
                    if line.startswith("Pss:")
                )
                total += 1024 * int(line.split()[1])
    return total


def main() -> int:
    """0, or 1 if a ratio is below the bound."""
    options = _options()
    if options.side:
        found = SIDES[options.side](Path(options.sources[0]), Path(options.sources[1]),
                                    options.workers)  # fmt: skip
        print(json.dumps(found))
        return 0
    sides = [*SIDES, *(["datatrove"] if options.datatrove else [])]
    best: dict[str, dict[str, Any]] = {}
    peaks: dict[str, int] = {}
    work = Path(tempfile.mkdtemp(prefix="touchstone-data-", dir=options.scratch))
    try:
        lines = work / "lines"
        lines.mkdir()
        num_bytes = write_lines(options.sources, lines, options.workers, options.max_bytes)
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                found = measured(side, lines, options.workers, options.datatrove)
                peaks[side] = max(peaks.get(side, 0), found["peak_bytes"])
                if side not in best or found["seconds"] < best[side]["seconds"]:
                    best[side] = found
                best[side]["peak_bytes"] = peaks[side]
    finally:
        shutil.rmtree(work)
    return _told(best, num_bytes, options)


def _told(best: dict[str, dict[str, Any]], num_bytes: int, options: argparse.Namespace) -> int:
    heads = ("side", "seconds", "MB/s", "documents", "tokens", "peak MiB", "stages")
    table = Table(*heads, title=f"{num_bytes / 1e6:.1f} MB of text, {options.workers} workers")
    for side, found in best.items():
        stages = ", ".join(f"{k} {v:.1f}" for k, v in found.get("stages", {}).items())
        table.add_row(
            side, f"{found['seconds']:.1f}", f"{num_bytes / 1e6 / found['seconds']:.2f}",
            f"{found['num_documents']:,}", f"{found.get('num_tokens', 0):,}",
            f"{found.get('peak_bytes', 0) / 2**20:,.0f}", stages,
        )  # fmt: skip
    Console(width=160).print(table)
    own = best["reference"]["stages"]
    seconds = {side: found["seconds"] for side, found in best.items()}
    print(f"datasets / all of the reference: {seconds['datasets'] / seconds['reference']:.2f}")
    without = seconds["reference"] - own["check"]
    ratios = {"datasets / reference without its check": seconds["datasets"] / without}
    if "datatrove" in best:
        finding = own["read"] + own["duplicates"]
        ratios["datatrove / reading and duplicates"] = seconds["datatrove"] / finding
        both = seconds["datasets"] + seconds["datatrove"]
        ratios["datasets and datatrove / all of the reference"] = both / seconds["reference"]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    return int(min(ratios.values()) < options.at_least)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m candidates.peers.data_benchmark")
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE")
    add("--max-bytes", type=int, default=200_000_000, metavar="N")
    add("--workers", type=int, default=2, metavar="N")
    add(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="the fastest of N counts, and the highest peak",
    )
    add("--datatrove", metavar="PYTHON", help="an interpreter that has datatrove")
    add("--at-least", type=float, default=1.0, metavar="RATIO")
    add("--scratch", metavar="DIR", help="where the text is written, three times")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
