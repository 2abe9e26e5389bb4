"""A snapshot as the files of a folder, and the manifest that names them all.

model.safetensors        parameters and buffers, a tie once
optimizer.safetensors    NAME/step, NAME/first_moment, NAME/second_moment
random-RANK.safetensors  the generators of one process; one file each
state.json               the other parts, and the layout of every tensor
manifest.json            written last: size and SHA-256 of every file, digests of the parts

W ranks write model-RANK-of-W.safetensors and optimizer-RANK-of-W.safetensors with what each holds,
equal copies once, and where it begins in the whole tensor. torch.distributed.checkpoint reads them
(HuggingFaceStorageReader). Its own writer and reader are not used: with torch 2.13 the writer keeps
two more copies of a rank's shard in memory and takes no checksum; the reader takes a changed byte,
and where the first rank's file is missing it leaves those rows as they were and says nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, BinaryIO, Protocol

from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.state import canonical_json
from reference.checkpoint.tensors import (
    PIECE_BYTES,
    parse_object,
    sha256,
    some,
)
from reference.update import Counters

FORMAT, VERSION = "touchstone checkpoint", 1
MANIFEST, STATE = "manifest.json", "state.json"
RANDOM = "random-{:05d}.safetensors"
TENSOR_PARTS = ("parameters", "optimizer", "random")
# The manifest is parsed before any hash is known: in memory JSON may be 22 times as large.
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 2**20, 16 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LAYOUTS = "tensors"
JSON_PARTS: dict[str, Any] = {
    "config": dict,
    "ties": dict,
    "weight_decays": dict,
    "settings": dict,
    "counters": dict,
    "data": dict,
    "identity": dict,
    "world": dict,
    "loss_scale": (dict, NoneType),
}


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """files: of the checkpoint, but for the manifest; parts: digests as `digests` gives them;
    ranks: {rank: the files that this process alone has}.
    """

    files: dict[str, FileRecord]
    parts: dict[str, str]
    ranks: dict[str, list[str]]
    world_size: int


class Source(Protocol):
    """The files of one checkpoint, wherever they are; `str()` of it names it in messages."""

    def sizes(self) -> dict[str, int]:
        """{file: its size in bytes, -1 of no plain file}; CheckpointError without a folder."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The file, open for reading."""
        ...


def tensor_files(rank: int, world_size: int) -> dict[str, str]:
    """{part: file} of the parts that are tensors, for one rank."""
    of = "" if world_size == 1 else f"-{rank:05d}-of-{world_size:05d}"
    names = (f"model{of}.safetensors", f"optimizer{of}.safetensors", RANDOM.format(rank))
    return dict(zip(TENSOR_PARTS, names, strict=True))


def part_digest(digests: Sequence[str]) -> str:
    """Of a part, from the SHA-256 of its files in rank order: of one file that itself."""
    return digests[0] if len(digests) == 1 else sha256([canonical_json(list(digests))])


def read_manifest(source: Source) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right size.

    Raises CheckpointError if there is none, if one byte of it was changed, for another version,
    and for a file that is missing or of another size.
    """
    sizes = source.sizes()
    if MANIFEST not in sizes:
        raise CheckpointError(f"{source} has no {MANIFEST}: it is no complete checkpoint")
    manifest = _parsed(source, sizes[MANIFEST])
    if missing := manifest.files.keys() - sizes.keys():
        raise CheckpointError(f"{source} does not hold {some(missing)}, which {MANIFEST} names")
    for name, record in manifest.files.items():
        if sizes[name] != record.num_bytes:
            raise CheckpointError(
                f"{source}/{name} has {sizes[name]} bytes, {MANIFEST} says {record.num_bytes}"
            )
    for rank in range(manifest.world_size):
        names = manifest.ranks.get(str(rank))
        own = set(tensor_files(rank, manifest.world_size).values())
        if not isinstance(names, list) or not own <= {str(name) for name in names}:
            raise CheckpointError(
                f"{source} is of {manifest.world_size} processes and has no file of rank {rank}"
            )
        if missing := {str(name) for name in names} - manifest.files.keys():
            raise CheckpointError(f"{source}: {some(missing)} of rank {rank} were not written")
    return manifest


def require_hash(source: Source, name: str, record: FileRecord) -> None:
    """Reads the file in pieces of PIECE_BYTES; CheckpointError if it is not what was written."""
    with source.open(name) as file:
        found = sha256(iter(lambda: file.read(PIECE_BYTES), b""))
    if found != record.sha256:
        raise CheckpointError(
            f"{source}/{name} was changed: its SHA-256 is {found[:12]}…, {MANIFEST} says "
            f"{record.sha256[:12]}…"
        )


def require_written(source: Source) -> None:
    """Reads everything again; CheckpointError unless it is a checkpoint that `load` would read."""
    manifest = read_manifest(source)
    read_state(source, manifest)
    for name, record in manifest.files.items():
        require_hash(source, name, record)


def _read_small(source: Source, name: str, num_bytes: int, most: int) -> bytes:
    if not 0 <= num_bytes <= most:
        raise CheckpointError(f"{source}/{name} has {num_bytes} bytes; at most {most} are read")
    with source.open(name) as file:
        return file.read(num_bytes)


def read_state(source: Source, manifest: Manifest) -> dict[str, Any]:
    """The content of state.json: JSON_PARTS, each as its digest says, and LAYOUTS.

    Raises CheckpointError for a changed byte and for a part that is missing or of another type.
    """
    record = manifest.files.get(STATE)
    if record is None:
        raise CheckpointError(f"{source} has no {STATE}")
    text = _read_small(source, STATE, record.num_bytes, MAX_STATE_BYTES)
    if sha256([text]) != record.sha256:
        raise CheckpointError(f"{source}/{STATE} was changed: its SHA-256 is another")
    state = parse_object(text, f"{source}/{STATE}")
    for part, types in {**JSON_PARTS, LAYOUTS: dict}.items():
        if part not in state or not isinstance(state[part], types):
            raise CheckpointError(f"{source}/{STATE} has no {part}")
        if part != LAYOUTS and _digest(state[part]) != manifest.parts.get(part):
            raise CheckpointError(f"{source}: {part} in {STATE} is not the one in {MANIFEST}")
    counters = state["counters"]
    names = {field.name for field in fields(Counters)}
    if counters.keys() != names or any(type(count) is not int for count in counters.values()):
        raise CheckpointError(f"{source}/{STATE} must have the counters {some(names)}")
    if state["world"].get("world_size") != manifest.world_size:
        raise CheckpointError(f"{source}: world_size in {STATE} is not the one in {MANIFEST}")
    return state


def _digest(content: Any) -> str | None:
    """The SHA-256 of what was parsed; None if it has no spelling, such as half a surrogate pair."""
    try:
        return sha256([canonical_json(content)])
    except (ValueError, RecursionError):
        return None


def _parsed(source: Source, num_bytes: int) -> Manifest:
    what = f"{source}/{MANIFEST}"
    text = _read_small(source, MANIFEST, num_bytes, MAX_MANIFEST_BYTES)
    content = parse_object(text, what)
    # Every byte counts, spaces too: the text must be the one spelling of what it says.
    whole, stated = _digest(content), content.pop("sha256", None)
    if whole != sha256([text]) or _digest(content) != stated:
        raise CheckpointError(f"{what} was changed: its own SHA-256 is another")
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{what} is of {content.get('format')!r}, version {content.get('version')!r}; "
            f"this program reads {FORMAT!r}, version {VERSION}"
        )
    files, parts = _records(content.get("files")), content.get("parts")
    ranks, world_size = content.get("ranks"), content.get("world_size")
    if files is None or not isinstance(parts, dict) or not isinstance(ranks, dict):
        raise CheckpointError(f"{what} does not name files, parts and ranks")
    if type(world_size) is not int or world_size < 1:
        raise CheckpointError(f"{what} says world_size {world_size!r}")
    return Manifest(files, parts, ranks, world_size)


def _records(files: Any) -> dict[str, FileRecord] | None:
    """{file: its record}; None if that is not what `files` holds."""
    if not isinstance(files, dict) or not all(_FILE_NAME.fullmatch(name) for name in files):
        return None
    records = {}
    for name, entry in files.items():
        if not isinstance(entry, dict):
            return None
        num_bytes, digest = entry.get("bytes"), entry.get("sha256")
        if type(num_bytes) is not int or not isinstance(digest, str):
            return None
        records[name] = FileRecord(num_bytes, digest)
    return records
