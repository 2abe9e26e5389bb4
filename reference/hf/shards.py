"""The tensors of a folder of safetensors files: what is there, read piece by piece."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A file is mapped into memory while it is open, and every page that was read stays counted until it
# is closed. So it is opened anew for every piece of a tensor.
PIECE_BYTES = 16 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """Where one tensor is stored, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, I8 …

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of torch for a float dtype; None for any other."""
        return _DTYPES.get(self.dtype)


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of `directory` by name, from the headers alone.

    Raises ValueError naming the file if there is none, if the index and the files disagree about
    which tensor is where, or if a file is not a whole safetensors file.
    """
    whole, index = directory / WHOLE, directory / INDEX
    if whole.exists() and index.exists():
        raise ValueError(f"{directory} holds both {WHOLE} and {INDEX}; remove the one that is old")
    if whole.exists():
        return _header(whole)
    if not index.exists():
        raise ValueError(f"{directory} holds neither {WHOLE} nor {INDEX}; only safetensors is read")
    weight_map = _weight_map(index)
    found: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise ValueError(f"{INDEX} names the file {name}, which {directory} does not hold")
        inside = _header(directory / name)
        promised = {tensor for tensor, file in weight_map.items() if file == name}
        if inside.keys() != promised:
            raise ValueError(
                f"{INDEX} and the file {name} differ: only in the index "
                f"{sorted(promised - inside.keys())}, only in the file "
                f"{sorted(inside.keys() - promised)}"
            )
        found |= inside
    return found


def pieces(name: str, stored: Stored) -> Iterator[tuple[slice, Tensor]]:
    """The tensor in pieces of at most PIECE_BYTES (or one row), each with its place on axis 0."""
    from safetensors import safe_open

    num_rows = stored.shape[0] if stored.shape else 1
    row_bytes = max(
        1, torch.Size(stored.shape[1:]).numel() * (stored.torch_dtype or torch.int8).itemsize
    )
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        place = slice(start, min(start + step, num_rows))
        with safe_open(stored.file, framework="pt") as file:
            yield place, file.get_slice(name)[place]


def write_shards(directory: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """`tensors` in files of at most `max_shard_bytes` (or one tensor), with an index if several."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    free_bytes = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > free_bytes and shards[-1]:
            shards.append({})
            free_bytes = max_shard_bytes
        shards[-1][name] = tensor
        free_bytes -= tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(on_cpu, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        write_json(directory / INDEX, {"metadata": total, "weight_map": weight_map})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError naming the file if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as indented JSON, keys in their order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _header(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                piece = file.get_slice(name)
                found[name] = Stored(path, tuple(piece.get_shape()), piece.get_dtype())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    return found


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensors to files")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} names the file {file!r}; it must lie beside the index")
    return weight_map
