"""The same checkpoints in an object store, which has no rename: the marker comes last.

URL/step-00000012/TIME-RANDOM/…  the files of one attempt, manifest.json the last of them
URL/step-00000012/COMPLETE       names the attempt and the SHA-256 of its manifest

Any fsspec URL: memory://, s3://, gs://, file:// … On a file system `save` is better.
"""

import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec  # type: ignore[import-untyped]

from reference.checkpoint.commit import require_retention, retained, step_name, steps_of
from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.files import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileRecord,
    read_manifest,
    require_written,
)
from reference.checkpoint.load import Expected, load_from
from reference.checkpoint.state import Snapshot, canonical_json
from reference.checkpoint.temporary import FOREIGN_AGE_SECONDS
from reference.checkpoint.tensors import parse_object, sha256
from reference.checkpoint.write import write_files
from reference.hf.folder import FolderTakenError

MARKER = "COMPLETE"
MAX_MARKER_BYTES = 4096
_ATTEMPT = re.compile(r"(\d{10,})-[0-9a-f]{32}")


def save_objects(url: str, snapshot: Snapshot, keep_last: int = 2, keep_every: int = 0) -> str:
    """Publishes `snapshot` under `url`, as `save` does; returns the URL of the step.

    Files are verified by reading them again, before the marker is written. Attempts without a
    marker are removed by a later save when they began FOREIGN_AGE_SECONDS ago.

    Raises as `save`. Two writers never mix their files. If both get as far as the marker, the
    later marker holds; the other writer sees that and gets FolderTakenError.
    """
    require_retention(keep_last, keep_every)
    store, root = _store(url)
    step = f"{root}/{step_name(snapshot.counters.optimizer_steps)}"
    name = f"{int(time.time()):010d}-{uuid.uuid4().hex}"
    attempt = ObjectFolder(store, f"{step}/{name}")
    _refuse_complete(store, step)
    try:
        manifest = write_files(snapshot, lambda file, pieces: attempt.write(file, pieces))
        attempt.write(MANIFEST, [manifest])
        require_written(attempt)
        _refuse_complete(store, step)
    except BaseException:
        with suppress(OSError):
            store.rm(attempt.path, recursive=True)
        raise
    marker = canonical_json({"attempt": name, "manifest_sha256": sha256([manifest])})
    ObjectFolder(store, step).write(MARKER, [marker])
    if _attempt(store, step) != attempt:
        raise FolderTakenError(f"another writer published {step} at the same time")
    _retain(store, root, keep_last, keep_every)
    return str(store.unstrip_protocol(step))


def latest_objects(url: str) -> str | None:
    """The URL of the newest complete checkpoint under `url`; None if there is none."""
    store, root = _store(url)
    for step in _complete(store, root):
        return str(store.unstrip_protocol(f"{root}/{step_name(step)}"))
    return None


def load_objects(url: str, expected: Expected) -> Snapshot:
    """The snapshot at the URL that save_objects and latest_objects give; refuses as `load`."""
    store, step = _store(url)
    try:
        attempt = _attempt(store, step)
    except OSError as error:
        raise CheckpointError(f"{url} cannot be read: {error}") from error
    return load_from(attempt, expected)


@dataclass(frozen=True)
class ObjectFolder:
    """The objects under one prefix of a store."""

    store: Any
    path: str

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.path))

    def sizes(self) -> dict[str, int]:
        """The size of every object, -1 of a folder; CheckpointError if there is nothing."""
        try:
            entries = self.store.ls(self.path, detail=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self} does not exist") from error
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: (
                int(entry["size"] or 0) if entry["type"] == "file" else -1
            )
            for entry in entries
        }

    def open(self, name: str) -> BinaryIO:
        """The object, open for reading."""
        file: BinaryIO = self.store.open(f"{self.path}/{name}", "rb")
        return file

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> FileRecord:
        """Writes the pieces as one object."""
        self.store.makedirs(self.path, exist_ok=True)
        digest, num_bytes = hashlib.sha256(), 0
        with self.store.open(f"{self.path}/{name}", "wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(bytes(piece))
                num_bytes += len(piece)
        return FileRecord(num_bytes, digest.hexdigest())


def _store(url: str) -> tuple[Any, str]:
    """The store and the path in it; what it remembers of its content is forgotten."""
    store, path = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return store, str(path).rstrip("/")


def _names(store: Any, path: str) -> list[str]:
    try:
        entries = store.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]


def _attempt(store: Any, step: str) -> ObjectFolder:
    """The attempt that the marker of `step` names; CheckpointError if there is no whole one."""
    folder = ObjectFolder(store, step)
    try:
        with folder.open(MARKER) as file:
            marker = parse_object(file.read(MAX_MARKER_BYTES), f"{folder}/{MARKER}")
        name, digest = marker.get("attempt"), marker.get("manifest_sha256")
        if not isinstance(name, str) or not _ATTEMPT.fullmatch(name):
            raise CheckpointError(f"{folder}/{MARKER} names no attempt")
        attempt = ObjectFolder(store, f"{step}/{name}")
        with attempt.open(MANIFEST) as file:
            found = sha256([file.read(MAX_MANIFEST_BYTES + 1)])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: {error}") from error
    if found != digest:
        raise CheckpointError(f"{folder}/{MARKER} is of another {MANIFEST}")
    return attempt


def _is_complete(store: Any, step: str) -> bool:
    try:
        read_manifest(_attempt(store, step))
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _complete(store: Any, root: str) -> Iterator[int]:
    for step in sorted(steps_of(_names(store, root)), reverse=True):
        if _is_complete(store, f"{root}/{step_name(step)}"):
            yield step


def _refuse_complete(store: Any, step: str) -> None:
    store.invalidate_cache()
    if _is_complete(store, step):
        raise FolderTakenError(f"the checkpoint {store.unstrip_protocol(step)} exists already")


def _retain(store: Any, root: str, keep_last: int, keep_every: int) -> None:
    """Removes what need not be kept, its marker first, and attempts that were given up."""
    steps = list(_complete(store, root))
    kept = retained(steps, keep_last, keep_every)
    for step in sorted(set(steps) - kept):
        path = f"{root}/{step_name(step)}"
        store.rm(f"{path}/{MARKER}")
        store.rm(path, recursive=True)
    for step in steps_of(_names(store, root)):
        path = f"{root}/{step_name(step)}"
        published = _attempt(store, path).path if step in kept else ""
        for name in _names(store, path):
            match = _ATTEMPT.fullmatch(name)
            is_old = match and time.time() - int(match[1]) > FOREIGN_AGE_SECONDS
            if is_old and f"{path}/{name}" != published:
                store.rm(f"{path}/{name}", recursive=True)
