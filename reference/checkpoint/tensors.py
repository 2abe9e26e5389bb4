"""Named tensors as a stream of safetensors bytes, and back.

The format is that of the safetensors library, which reads what is written here. It is written and
read by hand so that one pass can write, hash and be interrupted at any piece, and so that nothing
is allocated for a header that lies.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from reference.checkpoint.errors import CheckpointError

# A thread that writes asks for Python's lock at every piece, and training waits for it each time:
# pieces of 1 MiB doubled the time of a save beside training.
PIECE_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_PICKLES = (b"\x80", b"PK")  # a bare pickle, and the zip that torch.save writes


@dataclass(frozen=True)
class Layout:
    """dtype as safetensors spells it (F32, BF16 …) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the values."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def layout_of(tensor: Tensor) -> Layout:
    """The layout of `tensor`; ValueError for a dtype that is not stored."""
    if tensor.dtype not in _SPELLED:
        raise ValueError(
            f"tensors of {tensor.dtype} are not stored; only of {', '.join(map(str, _SPELLED))}"
        )
    return Layout(_SPELLED[tensor.dtype], tuple(tensor.shape))


def stream(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of `tensors`, in pieces of at most PIECE_BYTES.

    Wide dtypes come first, so that every tensor is aligned; then by name. offsets: where each
    begins in the tensor that it is a part of; torch's HuggingFaceStorageReader finds them there.
    """
    layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
    order = sorted(layouts, key=lambda name: (-DTYPES[layouts[name].dtype].itemsize, name))
    metadata = {"format": "pt"}
    if offsets is not None:
        parts = {name: {"saved_offsets": list(offsets[name])} for name in order}
        metadata |= {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0"}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name in order:
        layout = layouts[name]
        end = start + layout.num_bytes
        header[name] = {
            "dtype": layout.dtype,
            "shape": list(layout.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a header of {len(text)} bytes is not written; at most {MAX_HEADER_BYTES}"
        )
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for name in order:
        flat = _bytes_of(tensors[name].detach())
        for offset in range(0, len(flat), PIECE_BYTES):
            # Of a tensor on a device only this piece is on the CPU.
            yield flat[offset : offset + PIECE_BYTES].cpu().numpy().data


def sha256(pieces: Iterable[bytes | memoryview]) -> str:
    """The SHA-256 of the pieces one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def read_tensors(
    file: BinaryIO, name: str, want: Mapping[str, Layout], chosen: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the `chosen` ones of an open safetensors file, as they come in it.

    name: of the file, for messages; want: everything that is in it, as in require_header.
    """
    offsets = require_header(file, name, want)
    values_start = file.tell()
    for tensor_name in sorted(chosen, key=lambda name: offsets[name]):
        layout = want[tensor_name]
        tensor = torch.empty(layout.shape, dtype=DTYPES[layout.dtype])
        file.seek(values_start + offsets[tensor_name][0])
        values = _bytes_of(tensor).numpy().data
        while len(values):
            num_bytes = file.readinto(values)  # type: ignore[attr-defined]
            if not num_bytes:
                raise CheckpointError(f"{name} ends inside the tensor {tensor_name}")
            values = values[num_bytes:]
        yield tensor_name, tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """The values as [bytes] uint8, in the memory of `tensor` if that is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def require_header(
    file: BinaryIO, name: str, want: Mapping[str, Layout]
) -> dict[str, tuple[int, int]]:
    """Where the values of each tensor begin and end; the file stands at the first value then.

    The header must hold `want` and nothing else, and the values must fill the rest of the file.
    Raises CheckpointError, naming what differs, for another header and for another kind of file.
    """
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        if start.startswith(_PICKLES):  # as are the lengths of some headers, but those fit
            raise CheckpointError(f"{name} is a pickle, which could execute code; it is not read")
        raise CheckpointError(f"{name} is no safetensors file: its header is said to be {length} B")
    header = parse_object(file.read(length), name)
    header.pop("__metadata__", None)
    if header.keys() != want.keys():
        raise CheckpointError(
            f"{name} and state.json differ: only in the file {some(header.keys() - want.keys())}, "
            f"only in state.json {some(want.keys() - header.keys())}"
        )
    offsets = {key: _offsets(f"{name}: {key}", header[key], want[key]) for key in want}
    end = 0
    for place in sorted(offsets.values()):
        if place[0] != end:
            raise CheckpointError(f"{name} has a gap or an overlap at byte {end} of its values")
        end = place[1]
    if _LENGTH_BYTES + length + end != size:
        raise CheckpointError(f"{name} has {size} bytes, its header says otherwise")
    return offsets


def _offsets(what: str, entry: Any, layout: Layout) -> tuple[int, int]:
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(place, list) or [type(offset) for offset in place] != [int, int]:
        raise CheckpointError(f"{what} has no place, but {entry!r}")
    if (entry.get("dtype"), entry.get("shape")) != (layout.dtype, list(layout.shape)):
        raise CheckpointError(
            f"{what} is {entry.get('dtype')} {entry.get('shape')}, state.json says {layout}"
        )
    if place[1] - place[0] != layout.num_bytes:
        raise CheckpointError(f"{what} has the place {place}, which is not its size")
    return place[0], place[1]


def parse_object(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object `text`; CheckpointError, with the name of its file, if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is no JSON: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} must hold a JSON object, got a {type(content).__name__}")
    return content


def some(names: Iterable[str]) -> str:
    """The names in order, the first five of many."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return f"{', '.join(ordered[:5]) or 'nothing'}{rest}"
