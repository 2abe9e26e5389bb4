"""A preparation is whole or not there, goes on where it stopped, and gives the same bytes."""

import errno
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from prepared import content, lines, prepared, settings, text_folder, texts

from reference.checkpoint import disk
from reference.data.manifest import read_manifest
from reference.data.near_duplicates import DuplicateSettings
from reference.data.open_tokenizer import open_tokenizer
from reference.data.prepare import preparation_key, prepare
from reference.data.prepare_command import main
from reference.data.shards import document_record, open_documents, open_tokens
from reference.data.sources import parse_sources
from reference.data.work import working_folder


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("reference.data.sources.CHUNK_BYTES", 2_000)


@pytest.fixture
def folder(tmp_path):
    return text_folder(tmp_path / "source")


class Crash(BaseException):
    """A process that ends at once."""


def failing(monkeypatch, name, number, error):
    """disk.NAME raises at its call `number`; how often it was called."""
    calls, real = [], getattr(disk, name)

    def wrapped(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return real(*arguments)

    monkeypatch.setattr(disk, name, wrapped)
    return calls


def test_a_crash_at_any_rename_leaves_nothing_and_the_next_run_gives_the_same_bytes(
    folder, tmp_path, monkeypatch, small_chunks
):
    with monkeypatch.context() as patch:
        calls = failing(patch, "rename", 0, Crash())
        prepared(tmp_path / "whole", folder, tokenizer="bpe:300")
    want, num_calls = content(tmp_path / "whole"), len(calls)
    assert num_calls > 15
    for number in (1, 2, 5, num_calls // 2, num_calls - 4, num_calls - 1, num_calls):
        out = tmp_path / f"crash {number}"
        with monkeypatch.context() as patch:
            failing(patch, "rename", number, Crash())
            with pytest.raises(Crash):
                prepared(out, folder, tokenizer="bpe:300")
        assert not out.exists()
        with monkeypatch.context() as patch:
            again = failing(patch, "rename", 0, Crash())
            prepared(out, folder, tokenizer="bpe:300")
        most = num_calls - number + 4  # the three files of the check are always made again
        assert len(again) <= most, "finished parts were made again"
        assert content(out) == want
        assert not list(tmp_path.glob(f".{out.name}.*"))


@pytest.mark.parametrize("number", [1, 4, 12, 20, 24])
def test_a_full_disk_leaves_nothing_or_the_old_folder(
    folder, tmp_path, monkeypatch, small_chunks, number
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing(patch, "write", number, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            prepared(out, folder)
    assert not out.exists()
    prepared(out, folder)
    before = content(out)
    with pytest.raises(ValueError, match="exists already"):
        prepared(out, folder, seed=5)
    assert content(out) == before


def test_a_full_disk_is_said_in_a_sentence(folder, tmp_path, monkeypatch, capsys):
    failing(monkeypatch, "write", 3, OSError(errno.ENOSPC, "No space left on device"))
    assert main(["prepare", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_killed_process_is_gone_on_with(tmp_path):
    rows = [{"text": text} for text in texts(4_000, num_words=300)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    command = [sys.executable, "-m", "reference.data", "prepare", str(tmp_path / "rows.jsonl"),
               "--validation-fraction", "0.2"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed"), "--workers", "2"],
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".killed.prepare-*/chunk-00001.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # nobody of its session is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    assert not (tmp_path / "killed").exists()
    for name in ("killed", "whole"):
        subprocess.run([*command, "--out", str(tmp_path / name)], check=True, env=environment)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_the_number_of_workers_changes_no_byte(folder, tmp_path, small_chunks):
    (tmp_path / "rows.jsonl").write_bytes(lines({"text": text} for text in texts(30, 9)))
    sources = (folder, tmp_path / "rows.jsonl")
    found = {}
    for workers in (1, 2, 4):
        out = tmp_path / str(workers)
        prepared(out, *sources, workers=workers, tokenizer="bpe:300", shard_tokens=1_000)
        found[workers] = content(out)
    assert found[1] == found[2] == found[4]
    assert len([name for name in found[1] if name.endswith(".bin")]) > 6


def test_two_preparations_of_one_folder_are_refused(folder, tmp_path):
    sources = parse_sources([str(folder)])
    key = preparation_key(sources, settings())
    with (
        working_folder(tmp_path / "out", key),
        pytest.raises(ValueError, match="another process prepares"),
    ):
        prepare(sources, tmp_path / "out", settings())


def test_a_changed_source_is_not_gone_on_with(folder, tmp_path, monkeypatch, small_chunks, capsys):
    with monkeypatch.context() as patch:
        failing(patch, "rename", 9, Crash())
        with pytest.raises(Crash):
            prepared(tmp_path / "out", folder)
    (folder / "000.txt").write_text("another text")
    prepared(tmp_path / "out", folder)
    prepared(tmp_path / "fresh", folder)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert len(list(tmp_path.glob(".out.prepare-*"))) == 1  # that of the other source
    with pytest.raises(SystemExit):
        main(["prepare", str(folder), "--out", str(tmp_path / "out")])
    assert "is left of an unfinished preparation" in capsys.readouterr().err


def test_documents_can_be_found_again(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(
        lines(
            {"text": text, "topic": "odd" if i % 2 else "even"} for i, text in enumerate(texts(40))
        )
    )
    source = f"{tmp_path / 'rows.jsonl'}?slice=topic&licence=MIT"
    manifest = prepared(tmp_path / "out", source, shard_tokens=800)
    tokenizer = open_tokenizer(tmp_path / "out")
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    seen = 0
    for shard in manifest.shards:
        tokens, table = (
            open_tokens(tmp_path / "out", manifest, shard),
            open_documents(tmp_path / "out", shard),
        )
        for number in range(shard.num_documents):
            record = document_record(manifest, shard, table, number)
            row = json.loads(rows[record.row])
            own = tokens[record.start : record.start + record.num_tokens]
            assert bytes(own[:-1].tolist()).decode() == row["text"] and own[-1] == tokenizer.eos
            assert (record.slice, record.source, record.file) == (
                row["topic"], "rows.jsonl", "rows.jsonl",
            )  # fmt: skip
            seen += 1
    assert seen == 40 and len(manifest.shards) > 4
    assert manifest.sources[0].licence == "MIT"


def test_the_tokenizer_learns_from_training_text_alone(folder, tmp_path):
    manifest = prepared(tmp_path / "out", folder, tokenizer="characters")
    (step,) = [step for step in manifest.steps if step.name == "tokenizer"]
    trained = [s for s in manifest.slices if s.split == "train"]
    assert step.results["num_bytes"] == sum(s.num_bytes for s in trained)
    assert step.results["num_texts"] == sum(s.num_documents for s in trained)


def test_a_document_that_the_tokenizer_cannot_write_is_named(folder, tmp_path):
    prepared(tmp_path / "first", folder, tokenizer="characters")
    (folder / "017.txt").write_text("none of the 語")
    with pytest.raises(ValueError, match=r"017\.txt: .*U\+8A9E"):
        prepared(tmp_path / "out", folder, tokenizer=f"{tmp_path / 'first'}?eos=0")


def test_a_split_without_documents_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("a single document")
    with pytest.raises(ValueError, match=r"no document is left for .* make one cluster"):
        prepared(tmp_path / "out", tmp_path / "one.txt")


@pytest.mark.parametrize(("fraction", "split"), [(0.001, "validation"), (0.999, "train")])
def test_a_fraction_and_a_seed_that_work_are_said(fraction, split, folder, tmp_path):
    with pytest.raises(ValueError, match=f"no document is left for {split}") as refused:
        prepared(tmp_path / "out", folder, validation_fraction=fraction)
    said = re.search(r"or --validation-fraction (\S+) or --seed (\d+), which", str(refused.value))
    smallest, seed = float(said[1]), int(said[2])
    prepared(tmp_path / "other fraction", folder, validation_fraction=smallest)
    prepared(tmp_path / "other seed", folder, validation_fraction=fraction, seed=seed)
    if smallest > 0.01:
        with pytest.raises(ValueError, match="no document is left for validation"):
            prepared(tmp_path / "less", folder, validation_fraction=round(smallest - 0.01, 2))


def test_near_duplicates_are_sampled_and_told(tmp_path):
    own = texts(30, num_words=100)
    near = [text.rsplit(" ", 2)[0] + " other end" for text in own]
    far = [" ".join(text.split()[:50]) + " " + other for text, other in
           zip(own, texts(30, seed=5, num_words=50), strict=True)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_bytes(lines({"text": t} for t in [*own, *near, *far]))
    manifest = prepared(tmp_path / "out", tmp_path / "rows.jsonl")
    (step,) = [step for step in manifest.steps if step.name == "duplicates"]
    assert step.results["num_near_duplicates"] == 30
    assert step.results["sampled_num_pairs"] == 30 and step.results["sampled_num_false"] == 0
    assert step.results["sampled_lowest_similarity"] > 0.9
    assert step.results["sampled_num_missed"] == 0
    assert step.libraries["rensa"] and step.parameters["bands"] == 21
    blind = DuplicateSettings(bands=1, rows=126)
    manifest = prepared(tmp_path / "blind", tmp_path / "rows.jsonl", duplicates=blind)
    (step,) = [step for step in manifest.steps if step.name == "duplicates"]
    assert step.results["sampled_num_missed"] > 10, "missed pairs are told"


def test_ids_are_as_wide_as_the_vocabulary_needs(folder, tmp_path):
    manifest = prepared(tmp_path / "out", folder)
    assert manifest.tokenizer.id_dtype == "uint16"
    shard = manifest.shards[0]
    ids = np.fromfile(tmp_path / "out" / shard.tokens_file, "<u2")
    table = pq.read_table(tmp_path / "out" / shard.documents_file)
    assert len(ids) == shard.num_tokens == int(table["num_tokens"].to_numpy().sum())


def test_the_check_is_made_again_with_the_shards(folder, tmp_path, monkeypatch, small_chunks):
    with monkeypatch.context() as patch:
        calls = failing(patch, "rename", 0, Crash())
        prepared(tmp_path / "whole", folder)
    with monkeypatch.context() as patch:
        failing(patch, "rename", len(calls), Crash())  # the one that publishes
        with pytest.raises(Crash):
            prepared(tmp_path / "out", folder)
    checked = []
    prepare(
        parse_sources([str(folder)]),
        tmp_path / "out",
        settings(),
        progress=lambda stage, num_done: checked.append(num_done) if stage == "check" else None,
    )
    manifest = read_manifest(tmp_path / "out")
    assert sum(checked) == sum(shard.num_tokens for shard in manifest.shards)


def test_a_changed_data_set_is_not_gone_on_with(tmp_path, monkeypatch, small_chunks):
    (tmp_path / "rows").mkdir()
    rows, source = tmp_path / "rows" / "rows.jsonl", f"datasets:{tmp_path / 'rows'}"
    rows.write_bytes(lines({"text": text} for text in texts(40)))
    with monkeypatch.context() as patch:
        failing(patch, "rename", 5, Crash())
        with pytest.raises(Crash):
            prepared(tmp_path / "out", source)
    rows.write_bytes(lines({"text": text} for text in texts(40, seed=7)))
    prepared(tmp_path / "out", source)
    prepared(tmp_path / "fresh", source)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
