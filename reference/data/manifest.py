"""What a folder of prepared data says about itself: `manifest.json`, version 1.

DIR/manifest.json                    written last; the folder appears by one rename
DIR/tokenizer.json                   of whatever kind the manifest says
DIR/SPLIT/shard-00000.bin            token ids, little-endian; documents end to end, each with EOS
DIR/SPLIT/documents-00000.parquet    a row a document of that shard (`shards.DOCUMENTS`)

SPLIT is train or validation. A shard holds documents of one source, in the order of that source;
shards are numbered through all sources of a split, source by source. Shards, sources and
rows are numbered from 0; only a document's name in words counts rows from 1 (`place_of`).
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from reference.checkpoint.files import FileRecord, require_hash
from reference.checkpoint.load import LocalFolder
from reference.checkpoint.state import canonical_json
from reference.checkpoint.tensors import parse_object, sha256, some

FORMAT, VERSION = "touchstone data", 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
COMPLETE, UNFINISHED = "complete", "unfinished"
MAX_MANIFEST_BYTES = 64 * 2**20
ID_DTYPES = {"uint16": 2, "uint32": 4}  # bytes of a token id
Record = TypeVar("Record")


class DataError(ValueError):
    """A folder is no prepared data, or was changed; one sentence says how."""


@dataclass(frozen=True)
class Count:
    """A number of documents and the bytes of their text."""

    num_documents: int
    num_bytes: int


@dataclass(frozen=True)
class SourceRecord:
    """Where documents came from.

    name: unique here; kind: "files", "datasets" or "corpus"; origin: the SOURCE as it was given;
    snapshot: SHA-256 over the SHA-256 of every raw document in reading order; licence: as stated by
    who prepared, None if nobody did; weight: declared share when sources are mixed, None if the
    share is what the source has of all tokens; num_documents, num_bytes: read, as raw text, the
    parts of a text file that was cut each for itself; dropped: {reason: Count}, of raw text.
    """

    name: str
    kind: str
    origin: str
    snapshot: str
    licence: str | None
    weight: float | None
    num_files: int
    num_documents: int
    num_bytes: int
    dropped: dict[str, Count]


@dataclass(frozen=True)
class TokenizerRecord:
    """kind: "bytes", "characters", "bpe" or "file"; sha256: of tokenizer.json in the folder; eos:
    the id after every document; id_dtype: "uint16" or "uint32", the width in the shards.
    """

    kind: str
    sha256: str
    vocabulary_size: int
    eos: int
    id_dtype: str


@dataclass(frozen=True)
class ShardRecord:
    """One .bin and its .parquet. source: index into `Manifest.sources`; num_tokens: with EOS;
    num_bytes: of the documents' text, as it was tokenized.
    """

    split: str
    number: int
    source: int
    num_documents: int
    num_tokens: int
    num_bytes: int

    @property
    def tokens_file(self) -> str:
        """SPLIT/shard-00000.bin."""
        return f"{self.split}/shard-{self.number:05d}.bin"

    @property
    def documents_file(self) -> str:
        """SPLIT/documents-00000.parquet."""
        return f"{self.split}/documents-{self.number:05d}.parquet"


@dataclass(frozen=True)
class SliceRecord:
    """What one slice of one source has in one split; num_tokens: with EOS."""

    split: str
    source: int
    slice: str
    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """One step of the preparation. code: SHA-256 of its source files; libraries: {name: version};
    parameters and results: numbers and texts by name.
    """

    name: str
    code: str
    libraries: dict[str, str]
    parameters: dict[str, Any]
    results: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Everything but the tokens.

    policy: the fields of the `PackingPolicy`; seed: of the split; contamination: "status" is
    `COMPLETE` or `UNFINISHED`, the rest is what `check_shards` found; files: {path below the
    folder: size and SHA-256} of every file but the manifest.
    """

    sources: list[SourceRecord]
    tokenizer: TokenizerRecord
    policy: dict[str, Any]
    seed: int
    steps: list[StepRecord]
    shards: list[ShardRecord]
    slices: list[SliceRecord]
    contamination: dict[str, Any]
    files: dict[str, FileRecord]

    @property
    def sha256(self) -> str:
        """Names all of it: files enter by their hashes."""
        return sha256([canonical_json(asdict(self))])

    def shards_of(self, split: str) -> list[ShardRecord]:
        """Those of one split, in the order of their numbers."""
        return [shard for shard in self.shards if shard.split == split]


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of manifest.json: the same bytes for an equal manifest."""
    content = {"format": FORMAT, "version": VERSION, "sha256": manifest.sha256}
    return canonical_json({**content, **asdict(manifest)})


def read_manifest(directory: Path | str, hash_files: bool = True) -> Manifest:
    """The manifest of a folder whose files are all there, of the right size and content.

    hash_files: False takes the sizes as proof; nothing of a shard is read then.

    Raises DataError (a ValueError) if there is no manifest, for one byte of it changed, for another
    version, and for the first file that is missing, of another size or changed.
    """
    directory = Path(directory)
    source = LocalFolder(directory)
    manifest = _parsed(directory)
    require_consistent(directory, manifest)
    for name, record in manifest.files.items():
        try:
            num_bytes = (directory / name).stat().st_size
        except OSError as error:
            raise DataError(f"{directory} does not hold {name}, which {MANIFEST} names") from error
        if num_bytes != record.num_bytes:
            raise DataError(
                f"{directory / name} has {num_bytes:,} bytes, {MANIFEST} says {record.num_bytes:,}"
            )
    for name, record in manifest.files.items() if hash_files else ():
        try:
            require_hash(source, name, record)
        except ValueError as error:
            raise DataError(str(error)) from error
    return manifest


def require_consistent(directory: Path, manifest: Manifest) -> None:
    """DataError unless shards, sources, sizes and the tokenizer's id width agree."""
    tokenizer = manifest.tokenizer
    width = ID_DTYPES.get(tokenizer.id_dtype)
    if width is None or tokenizer.vocabulary_size > 256**width:
        raise DataError(
            f"{directory}: {tokenizer.vocabulary_size:,} tokens do not fit into ids of "
            f"{tokenizer.id_dtype!r}"
        )
    for shard in manifest.shards:
        if shard.split not in SPLITS or not 0 <= shard.source < len(manifest.sources):
            raise DataError(f"{directory}: no split {shard.split!r} or source {shard.source}")
        record = manifest.files.get(shard.tokens_file)
        if record is None or record.num_bytes != width * shard.num_tokens:
            raise DataError(
                f"{directory}/{shard.tokens_file} must have {width * shard.num_tokens:,} bytes "
                f"for {shard.num_tokens:,} tokens of {tokenizer.id_dtype}"
            )
    needed = {TOKENIZER, *(shard.documents_file for shard in manifest.shards)}
    if missing := needed - manifest.files.keys():
        raise DataError(f"{directory}: {MANIFEST} has no size and hash of {some(missing)}")
    if manifest.files[TOKENIZER].sha256 != tokenizer.sha256:
        raise DataError(f"{directory}: the tokenizer's hash is not that of {TOKENIZER}")


def require_uncontaminated(directory: Path | str, manifest: Manifest) -> None:
    """DataError unless the check of evaluation against training text was finished, and no
    evaluation document is a training document.
    """
    found = manifest.contamination
    if found.get("status") != COMPLETE:
        raise DataError(
            f"{directory}: its contamination check is {found.get('status')!r}; prepare it again "
            f"without --skip-contamination before training on it"
        )
    if num := found.get("num_shared_documents", -1):
        raise DataError(f"{directory}: {num} validation documents are in the training shards too")


def _parsed(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path} has more than {MAX_MANIFEST_BYTES:,} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{directory} is no prepared data: cannot read {MANIFEST} ({error.strerror}); make one "
            f"with python -m reference.data prepare"
        ) from error
    try:
        content = parse_object(text, str(path))
    except ValueError as error:
        raise DataError(str(error)) from error
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise DataError(
            f"{path} is of {content.get('format')!r}, version {content.get('version')!r}; this "
            f"program reads {FORMAT!r}, version {VERSION}"
        )
    stated = {name: content.pop(name, None) for name in ("format", "version", "sha256")}
    manifest: Manifest = _record(Manifest, content, str(path))
    if manifest_bytes(manifest) != text or stated["sha256"] != manifest.sha256:
        raise DataError(f"{path} was changed: its own SHA-256 is another")
    return manifest


def _record(kind: type[Record], content: Any, what: str) -> Record:
    """A dataclass from parsed JSON; DataError unless names and types are its own."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(content, dict) or content.keys() != names:
        got = some(content) if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{what} must have {some(names)}; got {got}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], content[name], f"{what}: {name}") for name in names})


def _value(hint: Any, content: Any, what: str) -> Any:
    if hint is Any:
        return content
    if is_dataclass(hint):
        return _record(hint, content, what)  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list and isinstance(content, list):
        return [_value(arguments[0], item, what) for item in content]
    if origin is dict and isinstance(content, dict):
        return {name: _value(arguments[1], item, what) for name, item in content.items()}
    allowed: Iterable[Any] = arguments if origin in (Union, types.UnionType) else (hint,)
    if type(content) not in allowed:
        raise DataError(f"{what} must be {hint}, got {content!r}")
    return content
