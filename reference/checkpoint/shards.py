"""Which part of every tensor a rank holds, and which of the ranks writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reference.checkpoint.peers import Peers

Json = dict[str, Any]


@dataclass(frozen=True)
class Box:
    """The elements [offset, offset + shape) of a tensor, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def shared_with(self, other: Box) -> Box | None:
        """The elements that are in both; None if there are none."""
        pairs = list(zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        starts = tuple(max(one, two) for one, _, two, _ in pairs)
        ends = [min(one + size, two + length) for one, size, two, length in pairs]
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Box(starts, shape)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where these elements are in a tensor that holds `outer`."""
        return tuple(
            slice(start - begin, start - begin + size)
            for start, begin, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    is_written: of equal copies, the one that goes into a file. is_first: the one written that
    begins at the first element; what belongs to the whole tensor is written with it.
    """

    box: Box
    is_written: bool
    is_first: bool


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; to import its class takes a second."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def shards_of(tensors: dict[str, Tensor], peers: Peers) -> dict[str, Shard]:
    """What this rank holds of each tensor; {} for a process that is alone with plain tensors.

    A plain tensor is the same on all ranks, which take turns to write them. Raises ValueError for
    a DTensor of partial sums, of another placement than torch's Shard and Replicate, and on a
    mesh that is not all ranks.
    """
    shards = {}
    for turn, (name, tensor) in enumerate(tensors.items()):
        if is_dtensor(tensor):
            shards[name] = _shard(name, tensor, peers)
        elif peers.world_size > 1:
            is_ours = turn % peers.world_size == peers.index
            shards[name] = Shard(whole(tensor.shape), is_ours, is_ours)
    return shards


def world_of(tensors: dict[str, Tensor], peers: Peers) -> Json:
    """{"world_size": W, "mesh": names and shape, "placements": {name: of each DTensor}}."""
    spread: dict[str, Any] = {n: t for n, t in tensors.items() if is_dtensor(t)}
    meshes = {str(t.device_mesh.mesh_dim_names): t.device_mesh for t in spread.values()}
    return {
        "world_size": peers.world_size,
        "mesh": {names: list(mesh.shape) for names, mesh in meshes.items()} or None,
        "placements": {name: str(t.placements) for name, t in spread.items()},
    }


def _shard(name: str, tensor: Any, peers: Peers) -> Shard:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if mesh.size() != peers.world_size or coordinate is None:
        raise ValueError(
            f"{name} is on a mesh of {mesh.size()} ranks, the run has {peers.world_size}"
        )
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    is_copy = False
    for place, index, num_ranks in zip(tensor.placements, coordinate, mesh.shape, strict=True):
        if place.is_replicate():
            is_copy = is_copy or index > 0
        elif type(place).__name__ == "Shard":
            dim = place.dim
            per_rank = -(-shape[dim] // num_ranks)  # as torch.chunk: the last may hold nothing
            start = min(index * per_rank, shape[dim])
            offset[dim] += start
            shape[dim] = min(per_rank, shape[dim] - start)
        else:
            raise ValueError(f"{name} is placed as {place}, which is not stored")
    box = Box(tuple(offset), tuple(shape))
    if box.shape != tuple(tensor.to_local().shape):
        raise ValueError(
            f"rank {peers.index} holds {list(tensor.to_local().shape)} of {name}, its placement "
            f"{tensor.placements} says {list(shape)}"
        )
    is_first = not any(coordinate)
    return Shard(box, is_first or (not is_copy and 0 not in shape), is_first)
