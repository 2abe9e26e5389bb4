"""Every kind of source gives the same documents; what cannot be read is named."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from prepared import lines, prepared, text_folder, texts

from reference.data import text_files
from reference.data.clean import CleanSettings, clean
from reference.data.source_folders import files_below
from reference.data.sources import chunks, parse_sources, read_chunk
from reference.data.text_files import Fields, documents_in

TEXT = Fields()
ROWS = [{"text": text, "kind": f"k{i % 2}"} for i, text in enumerate(texts(30))]


def zst(data):
    return zstandard.ZstdCompressor().compress(data)


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)


def write_arrow(path, writer):
    table = pa.Table.from_pylist(ROWS)
    with writer(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=8)


KINDS = {
    "rows.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "rows.jsonl.zst": lambda path: path.write_bytes(zst(lines(ROWS))),
    "frames.jsonl.zst": lambda path: path.write_bytes(zst(lines(ROWS[:9])) + zst(lines(ROWS[9:]))),
    "rows.parquet": write_parquet,
    "stream.arrow": lambda path: write_arrow(path, pa.ipc.new_stream),
    "file.arrow": lambda path: write_arrow(path, pa.ipc.new_file),
}


def read(path, fields=TEXT, max_bytes=2**20):
    return list(documents_in(path, path.name, fields, max_bytes))


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_kind_of_file_are_the_same(name, tmp_path):
    KINDS[name](tmp_path / name)
    found = read(tmp_path / name, Fields("text", "kind"))
    assert [d.data.decode() for d in found] == [row["text"] for row in ROWS]
    assert [(d.row, d.slice) for d in found] == [(i, f"k{i % 2}") for i in range(len(ROWS))]


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_datasets_streams_the_same_rows(name, tmp_path):
    KINDS[f"rows.{name}"](tmp_path / f"rows.{name}")
    source = f"datasets:{tmp_path}?slice=kind&name=rows"
    found = [d for chunk in chunks(parse_sources([source]), 2**20, 0) for d in chunk.documents]
    assert [d.data.decode() for d in found] == [row["text"] for row in ROWS]
    assert {d.slice for d in found} == {"k0", "k1"}


def test_datasets_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="datasets cannot stream"):
        list(chunks(parse_sources([f"datasets:{tmp_path / 'nothing'}"]), 2**20, 0))


def streamed(source):
    return [d for chunk in chunks(parse_sources([source]), 2**20, 0) for d in chunk.documents]


def test_what_datasets_cannot_read_is_said_with_the_source(tmp_path):
    write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path}\?split=test: .*Bad split: test") as refused:
        streamed(f"datasets:{tmp_path}?split=test")
    assert "\n" not in str(refused.value)
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"datasets cannot stream datasets:{tmp_path}: "):
        streamed(f"datasets:{tmp_path}")


def test_a_line_without_the_field_is_refused_behind_datasets_too(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines([*ROWS[:2], {"body": "x"}, *ROWS[2:]]))
    for source in (
        f"datasets:json?data_files={tmp_path / 'rows.jsonl'}",
        f"datasets:{tmp_path}",
    ):
        with pytest.raises(ValueError, match="row 3 has no field 'text'"):
            streamed(source)


@pytest.mark.parametrize("option", ["field=body", "field=text", "slice=foo"])
def test_options_of_rows_are_refused_where_there_are_none(option, tmp_path):
    folder = text_folder(tmp_path / "source", num=2)
    for place in (folder, folder / "000.txt"):
        with pytest.raises(ValueError, match=f"{option[:5]} is for files of rows"):
            parse_sources([f"{place}?{option}"])[0].below()
    with pytest.raises(ValueError, match="only is for folders"):
        parse_sources([f"{folder / '000.txt'}?only=txt"])[0].below()
    KINDS["rows.jsonl"](folder / "rows.jsonl")
    assert len(parse_sources([f"{folder}?{option}"])[0].below().files) == 3


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_is_cut_off_is_named(name, tmp_path):
    path = tmp_path / name
    KINDS[name](path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 3])
    with pytest.raises(ValueError, match=f"{name}"):
        read(path)


def test_packed_text_is_read_and_its_end_is_not_lost(tmp_path):
    text = b"many words\n" * 40_000
    (tmp_path / "a.txt.zst").write_bytes(zst(text))
    (tmp_path / "changelog.Debian.gz").write_bytes(gzip.compress(text))
    for path in files_below(tmp_path).files:
        assert [d.data for d in read(path)] == [text]
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match="cannot read"):
            read(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2 is no JSON"),
        (b'["a"]\n', "line 1 holds no object but list"),
        (b'{"body": "a"}\n', "has no field 'text'; it has body"),
        (b'{"text": 3}\n', "holds no text but int"),
    ],
)
def test_a_bad_line_is_named(data, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "' + b"a" * 200_000)
    with pytest.raises(ValueError, match="line 1 has more than"):
        read(path, max_bytes=1_000)


def test_little_that_stands_for_much_does_not_fill_the_memory(tmp_path, monkeypatch):
    packer = zstandard.ZstdCompressor().compressobj()
    parts = [packer.compress(b"a" * 2**24) for _ in range(16)]  # 256 MiB of one letter
    (tmp_path / "a.txt.zst").write_bytes(b"".join([*parts, packer.flush()]))
    made, whole = [], text_files._Frames._more

    def noted(frames):
        is_more = whole(frames)
        made.append(len(frames._made))
        return is_more

    monkeypatch.setattr(text_files._Frames, "_more", noted)
    parts = documents_in(tmp_path / "a.txt.zst", "a", TEXT, 2**20)
    assert sum(len(part.data) for part in parts) == 2**28 and max(made) <= 2**26


def test_text_that_is_no_unicode_is_dropped_or_refused():
    surrogate = json.loads('"\\ud800 half a pair"')
    document = text_files.row_document({"text": surrogate}, "f", 0, Fields(), "row 0")
    assert clean(document.data, CleanSettings()).dropped == "invalid UTF-8"
    with pytest.raises(ValueError, match=r"byte 3 \(0xe9\) is no UTF-8"):
        clean(b"caf\xe9", CleanSettings(refuse_invalid=True))


def test_cleaning_changes_nothing_that_it_does_not_name():
    for raw in (b"plain", "naïve 語\x00\x07".encode(), b" spaces \r alone \n"):
        assert clean(raw, CleanSettings()).text == raw
    found = clean(b"\xef\xbb\xbfa\r\nb\r\n", CleanSettings())
    assert found.text == b"a\nb\n" and len(found.steps) == 2
    assert clean(b"\xef\xbb\xbf \r\n", CleanSettings()).dropped == "empty"
    assert clean(b"a" * 11, CleanSettings(max_document_bytes=10)).dropped == "too long"


def test_chunks_hold_every_document_once_whatever_their_size(tmp_path, monkeypatch):
    folder = text_folder(tmp_path / "mixed")
    KINDS["rows.jsonl"](folder / "020.rows.jsonl")
    sources = parse_sources([str(folder)])

    def all_of():
        return [d for c in chunks(sources, 2**20, 0) for d in read_chunk(c, Fields(), 2**20)]

    whole = all_of()
    assert len(whole) == 40 + 30
    monkeypatch.setattr("reference.data.sources.CHUNK_BYTES", 500)
    assert all_of() == whole


def test_endings_choose_the_files_of_a_folder(tmp_path):
    for name in ("a.py", "b.rst", "c.json", "d.txt.gz"):
        (tmp_path / name).write_bytes(b"no JSON")
    (source,) = parse_sources([f"{tmp_path}?only=py,txt.gz"])
    assert [path.name for path in source.below().files] == ["a.py", "d.txt.gz"]
    (whole,) = parse_sources([f"{tmp_path}?name=all"])
    with pytest.raises(ValueError, match="only=py,txt"):
        list(chunks([whole], 2**20, 0))
    with pytest.raises(ValueError, match="no file that ends with lua"):
        parse_sources([f"{tmp_path}?only=lua"])[0].below()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "name at least one"),
        (["a.txt?wieght=1"], "no option wieght"),
        (["a.txt?split=train"], "no option split; .*; split is for datasets:NAME_OR_PATH"),
        (["datasets:x?only=py"], "no option only; .*; only is for folders of files"),
        (["language?field=x"], "no option field; .*; field is for files of rows"),
        (["datasets:"], "'datasets:' names nothing"),
        (["\udcff.txt"], r"\\udcff.txt': its name is no UTF-8"),
        (["a.txt?weight=1&weight=2"], "give every option once"),
        (["a.txt?weight=0"], "must be a number above 0"),
        (["a.txt?weight=nan"], "must be a number above 0"),
        (["a/x.txt", "b/x.txt"], "two sources are called 'x.txt'"),
        (["a.txt?weight=1", "b.txt"], "a weight to every source, or to none"),
    ],
)
def test_sources_that_cannot_be_meant_are_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        parse_sources(sources)


def test_an_empty_source_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    full = text_folder(tmp_path / "full")
    with pytest.raises(ValueError, match="holds no file of a known kind"):
        prepared(tmp_path / "out", full, empty)
    (empty / "a.txt").write_text(" \n")
    (empty / "b.txt").write_bytes(b"caf\xe9")
    (empty / "c.txt").write_bytes(b"caf\xe8")
    with pytest.raises(ValueError, match=r"is empty: .*dropped: 1 empty, 2 invalid UTF-8"):
        prepared(tmp_path / "out", full, empty)
    with pytest.raises(ValueError, match="no file or folder"):
        prepared(tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="no known kind of file"):
        prepared(tmp_path / "out", tmp_path / "picture.png")
    assert not (tmp_path / "out").exists()


def test_embedded_corpora_are_sources(tmp_path):
    manifest = prepared(tmp_path / "out", "python-docs?licence=PSF-2.0&weight=2")
    (source,) = manifest.sources
    assert (source.name, source.kind, source.licence, source.weight) == (
        "python-docs", "corpus", "PSF-2.0", 2.0,
    )  # fmt: skip
    assert source.num_documents > 50 and source.num_bytes > 400_000
