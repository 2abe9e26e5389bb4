"""Where the tensors of a checkpoint are in its files, and how parts of them come out again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.files import (
    LAYOUTS,
    MANIFEST,
    STATE,
    Manifest,
    Source,
    part_digest,
    tensor_files,
)
from reference.checkpoint.shards import Box, whole
from reference.checkpoint.tensors import DTYPES, Layout, read_tensors, require_header


@dataclass(frozen=True)
class Chunk:
    """One tensor in one file: the layout it has there, and which part of the whole one it is."""

    layout: Layout
    box: Box


Tables = dict[str, dict[str, Chunk]]  # {file: {tensor: what is in the file}}


def tables(source: Source, state: Mapping[str, Any], manifest: Manifest, part: str) -> Tables:
    """What the files of one part hold, as state.json has it; CheckpointError for a contradiction.

    part: one of TENSOR_PARTS. The files are in rank order.
    """
    names = [tensor_files(rank, manifest.world_size)[part] for rank in range(manifest.world_size)]
    if missing := [name for name in names if name not in manifest.files]:
        raise CheckpointError(f"{source} has no {missing[0]} that {MANIFEST} gives as its {part}")
    if part_digest([manifest.files[name].sha256 for name in names]) != manifest.parts.get(part):
        raise CheckpointError(f"{source} has another {names[0]} than {MANIFEST} says of its {part}")
    found = {}
    for name in names:
        table = state[LAYOUTS].get(name)
        if not isinstance(table, dict):
            raise CheckpointError(f"{source}/{STATE} does not say what {name} holds")
        found[name] = {tensor: _chunk(source, tensor, table[tensor]) for tensor in table}
    return found


def _chunk(source: Source, tensor: str, entry: Any) -> Chunk:
    if isinstance(entry, list) and len(entry) in (2, 3):
        dtype, shape, *rest = entry
        offset = rest[0] if rest else None
        if (
            isinstance(dtype, str)
            and dtype in DTYPES
            and _sizes(shape)
            and (offset is None or (_sizes(offset) and len(offset) == len(shape)))
        ):
            box = whole(shape) if offset is None else Box(tuple(offset), tuple(shape))
            return Chunk(Layout(dtype, tuple(shape)), box)
    raise CheckpointError(f"{source}/{STATE} says {entry!r} of {tensor}")


def _sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(size) is int and size >= 0 for size in numbers)


def wholes(source: Source, found: Tables) -> dict[str, Layout]:
    """{tensor: layout of the whole}; CheckpointError unless the chunks of each make up one tensor.

    They do if as many elements as the whole has are in boxes that begin at different places.
    """
    chunks: dict[str, list[Chunk]] = {}
    for table in found.values():
        for name, chunk in table.items():
            chunks.setdefault(name, []).append(chunk)
    layouts = {}
    for name, parts in chunks.items():
        ends = [
            [start + size for start, size in zip(part.box.offset, part.box.shape, strict=True)]
            for part in parts
        ]
        kinds = {(part.layout.dtype, len(part.layout.shape)) for part in parts}
        places = {part.box.offset for part in parts}
        if len(kinds) > 1 or len(places) < len(parts):
            raise CheckpointError(f"{source} has {len(parts)} parts of {name} that do not fit")
        shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
        if sum(prod(part.box.shape) for part in parts) != prod(shape):
            raise CheckpointError(f"{source} does not hold all of {name}, which is {list(shape)}")
        layouts[name] = Layout(parts[0].layout.dtype, shape)
    return layouts


def require_headers(source: Source, found: Tables, files: set[str]) -> None:
    """CheckpointError unless these files have the headers that state.json says."""
    for name in found.keys() & files:
        with source.open(name) as file:
            require_header(file, f"{source}/{name}", _layouts(found[name]))


def read(source: Source, found: Tables, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
    """These parts of the tensors, put together from the files that hold some of them.

    Beside them one chunk is in memory at a time.
    """
    tensors: dict[str, Tensor] = {}
    for name, table in found.items():
        chosen = [tensor for tensor in table.keys() & wanted.keys()
                  if _is_needed(table[tensor].box, wanted[tensor])]  # fmt: skip
        if not chosen:
            continue
        with source.open(name) as file:
            for tensor, values in read_tensors(file, f"{source}/{name}", _layouts(table), chosen):
                box, want = table[tensor].box, wanted[tensor]
                if box == want:
                    tensors[tensor] = values
                    continue
                if tensor not in tensors:
                    tensors[tensor] = torch.empty(want.shape, dtype=values.dtype)
                if shared := box.shared_with(want):
                    tensors[tensor][shared.inside(want)] = values[shared.inside(box)]
    return {tensor: tensors[tensor] for tensor in wanted}


def _is_needed(box: Box, want: Box) -> bool:
    """Also where nothing is wanted: then for the dtype, from the chunk with the first element."""
    return box.shared_with(want) is not None or (0 in want.shape and not any(box.offset))


def _layouts(table: Mapping[str, Chunk]) -> dict[str, Layout]:
    return {name: chunk.layout for name, chunk in table.items()}
