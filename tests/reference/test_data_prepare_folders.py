"""Nothing of a long text file is lost, and what is left out of a folder is told."""

import gzip
import os

import pytest
import zstandard
from prepared import content, prepared, settings, text_folder, texts

from reference.data import text_files
from reference.data.clean import CleanSettings
from reference.data.manifest import read_manifest
from reference.data.policy import PackingPolicy
from reference.data.prepare import preparation_key
from reference.data.remarks import remarks
from reference.data.sources import chunks, parse_sources
from reference.data.text_files import Fields, documents_in, place_of
from reference.data.work import working_folder


def read(path, max_bytes):
    return list(documents_in(path, path.name, Fields(), max_bytes))


def zst(data):
    return zstandard.ZstdCompressor().compress(data)


LONG = b"".join(b"line %d of a long text\n" % i for i in range(2_000))


@pytest.mark.parametrize("name", ["long.txt", "long.txt.gz", "long.txt.zst"])
def test_a_long_text_file_is_cut_at_line_ends_and_none_of_it_is_lost(name, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PART_BYTES", 1_000)
    pack = {"gz": gzip.compress, "zst": zst, "txt": bytes}[name.rpartition(".")[2]]
    (tmp_path / name).write_bytes(pack(LONG))
    for limit in (900, 1_500, 20_000, len(LONG) - 1):
        parts = read(tmp_path / name, max_bytes=limit)
        assert b"".join(part.data for part in parts) == LONG
        assert [part.row for part in parts] == list(range(len(parts)))
        assert all(part.data.endswith(b"\n") for part in parts)
        assert max(len(part.data) for part in parts) <= min(limit, 1_000)
    assert [part.row for part in read(tmp_path / name, max_bytes=len(LONG))] == [-1]


@pytest.mark.parametrize("size", [4, 7, 10, 100])
def test_text_without_line_ends_is_cut_between_characters(size, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PART_BYTES", size)
    text = "a語é👩" * 50
    (tmp_path / "a.txt").write_text(text)
    parts = read(tmp_path / "a.txt", max_bytes=size)
    assert "".join(part.data.decode() for part in parts) == text
    (tmp_path / "a.txt").write_bytes(b"\x80" * 200)  # no character begins anywhere
    assert sum(len(part.data) for part in read(tmp_path / "a.txt", max_bytes=size)) == 200


def test_a_long_text_file_is_prepared_whole_in_small_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PART_BYTES", 2_000)
    monkeypatch.setattr("reference.data.sources.CHUNK_BYTES", 10_000)
    source = tmp_path / "source"
    source.mkdir()
    text = "\n".join(texts(300)) + "\n"
    (source / "book.txt").write_text(text)
    settings = {"clean": CleanSettings(max_document_bytes=20_000), "policy": PackingPolicy(32)}
    manifest = prepared(tmp_path / "out", source, **settings)
    (one,) = manifest.sources
    assert one.num_bytes == len(text) and not one.dropped and one.num_files == 1
    assert sum(shard.num_bytes for shard in manifest.shards) == len(text)
    cut = manifest.steps[0].results["cut_files"]
    assert cut == {"source": {"num_files": 1, "num_documents": one.num_documents}}
    assert (
        f"1 text files of more than 20,000 bytes, at line ends, into {one.num_documents}"
        in (remarks(manifest)[0])
    )
    sizes = [
        sum(len(d.data) for d in chunk.documents)
        for chunk in chunks(parse_sources([str(source)]), 20_000, 0)
    ]
    assert len(sizes) > 4 and max(sizes) <= 12_000, "it is not held in memory as a whole"


def test_hidden_and_prepared_folders_are_left_out_and_told(tmp_path):
    source = text_folder(tmp_path / "source")
    want = content(prepare_into(source, tmp_path / "first"))
    for name in (".git/config.txt", ".hidden.txt", "sub/.venv/lib/a.py", "a.out", "b.out"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("what nobody wants to train on")
    (source / "link.txt").symlink_to(source / "000.txt")
    prepare_into(source, source / "inside")
    (source / ".other.prepare-0123456789ab").mkdir()
    (source / ".other.prepare-0123456789ab" / "chunk.txt").write_text("half")
    manifest = read_manifest(prepare_into(source, tmp_path / "again"))
    left_out = {"hidden": 3, "of no known kind": 2, "prepared data": 1, "symbolic links": 1}
    assert manifest.steps[0].results["left_out"] == {"source": left_out}
    assert manifest.sources[0].num_documents == 40
    assert remarks(manifest) == [
        "left out of source: 3 hidden, 2 of no known kind, 1 prepared data, 1 symbolic links"
    ]
    bins = {name: sha256 for name, sha256 in want.items() if name.endswith(".bin")}
    assert bins.items() <= content(tmp_path / "again").items()
    with pytest.raises(ValueError, match="is prepared data, not text"):
        parse_sources([str(source / "inside")])[0].below()


def test_names_that_are_no_utf8_are_left_out_and_told(tmp_path):
    source = text_folder(tmp_path / "source")
    (source / os.fsdecode(b"\xff.txt")).write_text("text")
    (source / os.fsdecode(b"\xfe")).mkdir()
    manifest = prepared(tmp_path / "out", source)
    assert remarks(manifest) == ["left out of source: 2 with a name that is no UTF-8"]


def test_a_preparation_inside_its_source_goes_on(tmp_path, monkeypatch):
    source = text_folder(tmp_path / "source")
    keys = []
    for _ in range(2):
        keys.append(preparation_key(parse_sources([str(source)]), settings()))
        with working_folder(source / "out", keys[-1]) as work:
            (work / "chunk-00000.text").write_text("half")
    assert keys[0] == keys[1]


def prepare_into(source, directory):
    prepared(directory, source)
    return directory


def test_documents_are_counted_from_one_in_words():
    assert [place_of(file, row) for file, row in (("a.txt", -1), ("a.txt", 0), ("a.jsonl", 0))] == [
        "a.txt", "a.txt part 1", "a.jsonl row 1",
    ]  # fmt: skip
