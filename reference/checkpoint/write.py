"""Writing a snapshot as the files that reference/checkpoint/files.py names."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from reference.checkpoint.files import (
    FORMAT,
    LAYOUTS,
    STATE,
    TENSOR_PARTS,
    VERSION,
    FileRecord,
    part_digest,
    tensor_files,
)
from reference.checkpoint.shards import Shard, whole
from reference.checkpoint.state import (
    Snapshot,
    canonical_json,
    json_digests,
    json_parts,
    tensor_parts,
)
from reference.checkpoint.tensors import layout_of, sha256, stream

Writer = Callable[[str, Iterable[bytes | memoryview]], FileRecord]
Written = dict[str, dict[str, Any]]  # {part: {"file", "bytes", "sha256", "tensors"}}


def write_files(snapshot: Snapshot, write_file: Writer) -> bytes:
    """Gives every file but the manifest to `write_file(name, pieces)`; returns the manifest.

    Raises ValueError for a snapshot of several ranks.
    """
    if snapshot.peers.world_size > 1:
        raise ValueError(f"{snapshot.peers.world_size} ranks save to a file system alone")
    return write_state(snapshot, [write_tensors(snapshot, write_file)], write_file)


def write_tensors(snapshot: Snapshot, write_file: Writer) -> Written:
    """Writes the tensors of this rank; what write_state must know of them."""
    index, world_size = snapshot.peers.index, snapshot.peers.world_size
    parts, written = tensor_parts(snapshot), {}
    for part, name in tensor_files(index, world_size).items():
        shards = _to_write(snapshot, part, parts[part])
        tensors = {tensor: parts[part][tensor] for tensor in shards}
        offsets = {tensor: list(shard.box.offset) for tensor, shard in shards.items()}
        is_sharded = world_size > 1 and part != "random"
        record = write_file(name, stream(tensors, offsets if is_sharded else None))
        table = {
            tensor: [layout_of(value).dtype, list(value.shape)]
            + ([offsets[tensor]] if is_sharded else [])
            for tensor, value in tensors.items()
        }
        described = {"bytes": record.num_bytes, "sha256": record.sha256}
        written[part] = {"file": name, **described, "tensors": table}
    return written


def digests_over_ranks(snapshot: Snapshot) -> dict[str, str]:
    """The parts of the manifest that `save` makes of `snapshot`; all of its ranks call together.

    Of one process as `digests`.
    """

    def hashed() -> list[str]:
        written = write_tensors(snapshot, _record_of)
        return [written[part]["sha256"] for part in TENSOR_PARTS]

    steps = snapshot.counters.optimizer_steps
    by_rank = snapshot.peers.agree(f"hash the state after {steps} updates", hashed)
    by_part = zip(TENSOR_PARTS, zip(*by_rank, strict=True), strict=True)
    return {part: part_digest(files) for part, files in by_part} | json_digests(snapshot)


def _record_of(name: str, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """What a writer returns that writes nothing."""
    digest, num_bytes = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        num_bytes += len(piece)
    return FileRecord(num_bytes, digest.hexdigest())


def _to_write(snapshot: Snapshot, part: str, tensors: dict[str, Tensor]) -> dict[str, Shard]:
    """The tensors of a part that this rank writes, with their place in the whole ones."""
    shards = {}
    for name, tensor in tensors.items():
        parameter, _, what = name.rpartition("/") if part == "optimizer" else (name, "", "")
        known = snapshot.shards.get(parameter) if part != "random" else None
        shard = known or Shard(whole(tensor.shape), is_written=True, is_first=True)
        if what == "step":
            shard = Shard(whole(()), shard.is_first, shard.is_first)
        if shard.is_written:
            shards[name] = shard
    return shards


def write_state(snapshot: Snapshot, ranks: Sequence[Written], write_file: Writer) -> bytes:
    """Writes state.json; returns the manifest. ranks: what write_tensors told, in rank order."""
    rest = json_parts(snapshot)
    tensors = [written[part] for written in ranks for part in TENSOR_PARTS]
    layouts = {entry["file"]: entry["tensors"] for entry in tensors}
    record = write_file(STATE, [canonical_json({**rest, LAYOUTS: layouts})])
    files = {entry["file"]: {key: entry[key] for key in ("bytes", "sha256")} for entry in tensors}
    files[STATE] = {"bytes": record.num_bytes, "sha256": record.sha256}
    parts = {
        part: part_digest([written[part]["sha256"] for written in ranks]) for part in TENSOR_PARTS
    }
    parts |= json_digests(snapshot)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": files,
        "parts": parts,
        "ranks": {
            str(rank): [written[part]["file"] for part in TENSOR_PARTS]
            for rank, written in enumerate(ranks)
        },
        "world_size": snapshot.world["world_size"],
        "counters": asdict(snapshot.counters),
        "identity": snapshot.identity,
    }
    return canonical_json({**content, "sha256": sha256([canonical_json(content)])})
