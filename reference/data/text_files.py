"""Documents in files: a text file is one, a line of JSONL or a row of Parquet or Arrow is one."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_NAMES = (
    "txt text md rst tex html htm xml csv py pyi c h cc cpp hpp cu js ts java go rs sh pl rb lua r "
    "sql cmake toml cfg ini yaml yml"
)
TEXT_SUFFIXES = frozenset(f".{name}" for name in _NAMES.split())
LINE_SUFFIXES = frozenset([".jsonl", ".ndjson", ".json"])
TABLE_SUFFIXES = frozenset([".parquet", ".arrow"])
PACKED_SUFFIXES = frozenset([".gz", ".zst"])
ROWS_AT_ONCE = 256
PACKED_RATIO = 64  # text is hardly packed better
FRAME_PIECE_BYTES = 2**10  # of packed bytes taken together: they may stand for 32 MiB of one letter
BUFFER_BYTES = 2**17
WHOLE_FILE = -1
PART_BYTES = 2**18  # of a text file that is too long to be one document


@dataclass(frozen=True)
class RawDocument:
    """data: as it stands in the source; file: its path below the source; row: in the file, from 0
    on, of a text file that was cut the number of the part, or `WHOLE_FILE`; slice: under which
    counts are kept.
    """

    file: str
    row: int
    slice: str
    data: bytes


@dataclass(frozen=True)
class Fields:
    """Which field of a row is the text, and which (if one) names its slice."""

    text: str = "text"
    slice: str | None = None


def place_of(file: str, row: int) -> str:
    """A document in words, for the screen and the manifest: rows, and the parts of a file that was
    cut, count from 1 there. row: the stored number, from 0, or `WHOLE_FILE`.
    """
    if row == WHOLE_FILE:
        return file
    return f"{file} {'part' if kind_of(Path(file)) == 'text' else 'row'} {row + 1:,}"


def kind_of(path: Path) -> str | None:
    """ "text", "lines" or "table"; None for a file that is not read. Packed text of any inner name
    (`changelog.Debian.gz`) is text.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in PACKED_SUFFIXES
    inner = suffixes[:-1] if packed else suffixes
    last = inner[-1] if inner else ""
    if last in LINE_SUFFIXES:
        return "lines"
    if last in TABLE_SUFFIXES:
        return None if packed else "table"
    if last in TEXT_SUFFIXES or (packed and last != ".tar"):
        return "text"
    return None


def documents_in(path: Path, name: str, fields: Fields, max_bytes: int) -> Iterator[RawDocument]:
    """The documents of one file. name: what they are said to come from; max_bytes: of a document,
    in a line without what JSON adds. A text file that has more is cut into parts of `PART_BYTES` or
    less, at ends of lines where there are any, else between two characters.

    Raises ValueError naming the file, and the line where there is one, for what cannot be read: a
    truncated file, a line that is no JSON object, a missing field.
    """
    try:
        kind = kind_of(path)
        if kind == "text":
            suffix = Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix
            with _opened(path) as file:
                yield from _text(file, name, suffix.lstrip(".").lower() or "text", max_bytes)
        elif kind == "lines":
            yield from _lines(path, name, fields, max_bytes)
        else:
            yield from _table(path, name, fields)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def row_document(
    row: dict[str, Any], file: str, number: int, fields: Fields, where: str
) -> RawDocument:
    """A row of any table as a document. Text that is no text in Unicode (half a surrogate pair) is
    handed on as bytes that are no UTF-8, so that cleaning decides. Missing text is empty.

    Raises ValueError naming `where` for a field that is not there or holds no text.
    """
    for field in (fields.text, fields.slice or fields.text):
        if field not in row:
            raise ValueError(f"{where} has no field {field!r}; it has {', '.join(map(str, row))}")
    text = row[fields.text]
    if text is None:
        text = ""
    if not isinstance(text, (str, bytes)):
        raise ValueError(f"{where}: {fields.text!r} holds no text but {type(text).__name__}")
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return RawDocument(file, number, str(row[fields.slice]) if fields.slice else "text", data)


def is_long(path: Path, max_bytes: int) -> bool:
    """Whether a text file may have more than max_bytes, as far as its size on disk says."""
    is_packed = path.suffix.lower() in PACKED_SUFFIXES
    return path.stat().st_size > (max_bytes // PACKED_RATIO if is_packed else max_bytes)


def _text(file: BinaryIO, name: str, slice_name: str, max_bytes: int) -> Iterator[RawDocument]:
    content = file.read(max_bytes + 1)
    if len(content) <= max_bytes:
        yield RawDocument(name, WHOLE_FILE, slice_name, content)
        return
    size = min(max_bytes, PART_BYTES)
    number = start = 0
    while True:
        if len(content) - start <= size:
            content, start = content[start:] + file.read(max_bytes), 0
        if not content:
            return
        end = _end_of_part(content, start, size)
        yield RawDocument(name, number, slice_name, content[start:end])
        number, start = number + 1, end


def _end_of_part(content: bytes, start: int, size: int) -> int:
    """Behind the last end of a line in content[start : start + size]; without one before the last
    character (of UTF-8) that does not fit.
    """
    end = start + size
    if end >= len(content):
        return len(content)
    line_end = content.rfind(b"\n", start, end) + 1
    if line_end:
        return line_end
    while end > start + max(size - 3, 1) and content[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _lines(path: Path, name: str, fields: Fields, max_bytes: int) -> Iterator[RawDocument]:
    limit = 6 * max_bytes + 2**16  # JSON may spell a byte with six, and has other fields
    with _opened(path) as file:
        number = 0
        while line := file.readline(limit + 1):
            where = f"{path} line {number + 1}"
            if len(line) > limit:
                raise ValueError(f"{where} has more than {limit:,} bytes")
            if line.strip():
                yield _line_document(line, name, number, fields, where)
            number += 1


def _line_document(line: bytes, name: str, number: int, fields: Fields, where: str) -> RawDocument:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return RawDocument(name, number, "text", line)  # which is no UTF-8: cleaning decides
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is no JSON: {error} (a folder with other .json files: PATH?only=py,txt)"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} holds no object but {type(row).__name__}")
    return row_document(row, name, number, fields, where)


def _table(path: Path, name: str, fields: Fields) -> Iterator[RawDocument]:
    import pyarrow as pa

    number = 0
    try:
        for batch in _record_batches(path, fields):
            for row in batch.to_pylist():
                yield row_document(row, name, number, fields, f"{path} row {number + 1}")
                number += 1
    except pa.ArrowException as error:
        raise ValueError(f"cannot read {path}, which may be cut off: {error}") from error


def _record_batches(path: Path, fields: Fields) -> Iterator[Any]:
    """The columns that are asked for, a few rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = [name for name in (fields.text, fields.slice) if name is not None]
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            columns = [name for name in wanted if name in file.schema_arrow.names] or None
            yield from file.iter_batches(ROWS_AT_ONCE, columns=columns)
        return
    with pa.memory_map(str(path)) as source:  # `datasets` writes streams, pandas writes files
        try:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            names = [name for name in wanted if name in batch.schema.names]
            small = batch.select(names) if names else batch
            for start in range(0, small.num_rows, ROWS_AT_ONCE):
                yield small.slice(start, ROWS_AT_ONCE)


def _opened(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Frames(path), BUFFER_BYTES))
    return path.open("rb")


class _Frames(io.RawIOBase):
    """The content of the zstd frames of a file, one after the other.

    zstandard's own stream reader ends quietly where a file is cut off; this one raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None  # None between two frames
        self._packed = self._made = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made and self._more():
            pass
        taken = self._made[: len(buffer)]
        self._made = self._made[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _more(self) -> bool:
        """Unpacks a piece; False at the end of the file."""
        import zstandard

        self._packed = self._packed or self._file.read(FRAME_PIECE_BYTES)
        if not self._packed:
            if self._frame is not None:
                raise EOFError("it ends inside a zstd frame: the file is cut off")
            return False
        try:
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._made = self._frame.decompress(self._packed)
        except zstandard.ZstdError as error:
            raise OSError(f"it is no zstd: {error}") from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True
