"""Communication: the collectives of one update, and the bytes that each rank hands to them.

The bytes are those of the tensor that a rank gives to a collective: the whole of an all-reduce and
of a reduce-scatter, the rank's own shard of an all-gather. What crosses a wire depends on the
algorithm: a ring of R ranks sends 2 (R - 1) / R of an all-reduce, (R - 1) / R of a reduce-scatter
and R - 1 shards of an all-gather from every rank.

A window of k microbatches; P parameters in U = L + 1 units, each of L layers and the rest; S ranks
that shard and Q that replicate; r and p bytes an element of reduced gradients and of gathered
parameters. s(u) is the sum over unit u's parameters of ceil(rows / S) times the other dimensions:
rows are dealt whole, and the shards of all ranks have one size.

    ddp      all-reduce      P r in buckets, once: the gradients of k microbatches are added first
    fsdp2    all-gather      s(u) p, for each layer in the forward and in the backward of each
                             microbatch, for the rest in the forward alone: k (2 L + 1)
             reduce-scatter  S s(u) r, once for each unit
    hybrid   as fsdp2, and
             all-reduce      s(u) r among the Q replicas, once for each unit

and in all of them, before and after: the targets and tokens of the window (an all-reduce of two
int64), its loss (an all-gather of one float64), and where gradients are sharded the square of
their norm (an all-reduce of one number as wide as they are reduced, but float32 at least). An
update without targets, which makes no gradient, has the first two of these alone. With S = 1
nothing is gathered or scattered.

Not counted: the broadcast when a model is distributed, the first update's agreement on DDP's
buckets, and whatever evaluation and checkpoints say to each other.
Sources: torch's documentation of DistributedDataParallel and fully_shard (reshard_after_forward).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import torch

from reference.config import ModelConfig
from reference.model import build_model

KINDS = ("ddp", "fsdp2", "hybrid")
BUCKET_BYTES = (2**20, 25 * 2**20)  # of DDP: the first to be ready, and the others
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one purpose in one update, as each rank of a group issues them.

    kind: "all_reduce", "all_gather" or "reduce_scatter"; num_bytes: handed in by a rank, over all
    `count` of them.
    """

    purpose: str
    kind: str
    count: int
    num_bytes: int
    group_size: int


@dataclass(frozen=True)
class Communication:
    """What one rank says in one update, in the order of the module's table."""

    traffic: tuple[Traffic, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Collectives an update, by kind."""
        found: Counter[str] = Counter()
        for part in self.traffic:
            found[part.kind] += part.count
        return dict(found)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes that a rank hands in an update, by kind."""
        found: Counter[str] = Counter()
        for part in self.traffic:
            found[part.kind] += part.num_bytes
        return dict(found)


def training_communication(
    config: ModelConfig,
    kind: str,
    mesh_shape: Sequence[int],
    num_microbatches: int,
    parameter_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    bucket_bytes: tuple[int, int] = BUCKET_BYTES,
) -> Communication:
    """The collectives of one update with targets. See the module for the formulae.

    kind: "ddp" or "fsdp2" on a mesh (ranks,), or "hybrid" on (replicate, shard). parameter_dtype:
    in which sharded parameters are gathered; DDP gathers none. reduce_dtype: of the gradients.
    bucket_bytes: a bucket of DDP is full when it holds so many; the number of buckets holds for
    gradients that become ready in the reverse of the parameters' order, their bytes for any order.

    Raises ValueError for another kind, for a mesh of another number of dimensions, and for a
    dimension or num_microbatches below 1.
    """
    dimensions = 2 if kind == "hybrid" else 1
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if len(mesh_shape) != dimensions or min(mesh_shape) < 1:
        raise ValueError(
            f"{kind} needs a mesh of {dimensions} dimension(s) of at least 1, got "
            f"{tuple(mesh_shape)}"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {num_microbatches}")
    shapes = _shapes(config)
    num_ranks, width = prod(mesh_shape), reduce_dtype.itemsize
    parts = [
        Traffic("targets and tokens", "all_reduce", 1, 2 * 8, num_ranks),
        Traffic("loss", "all_gather", 1, 8, num_ranks),
    ]
    if kind == "ddp":
        buckets = _buckets(list(shapes.values()), width, bucket_bytes)
        parts.append(Traffic("gradients", "all_reduce", len(buckets), sum(buckets), num_ranks))
    else:
        sharded = _sharded(config, shapes, mesh_shape[-1], num_microbatches)
        parts += sharded.traffic(parameter_dtype.itemsize, width)
        if kind == "hybrid":
            num_bytes = sharded.shard_elements * width
            parts.append(
                Traffic("replicas", "all_reduce", sharded.num_units, num_bytes, mesh_shape[0])
            )
    return Communication(tuple(parts))


@dataclass(frozen=True)
class _Sharded:
    """Units over `num_shards` ranks: elements of a rank's shards, and what it gathers of them."""

    num_shards: int
    num_units: int
    shard_elements: int
    num_gathers: int
    gathered_elements: int

    def traffic(self, parameter_bytes: int, gradient_bytes: int) -> list[Traffic]:
        norm = Traffic("gradient norm", "all_reduce", 1, max(gradient_bytes, 4), self.num_shards)
        if self.num_shards == 1:
            return [norm]
        gathered = self.gathered_elements * parameter_bytes
        reduced = self.num_shards * self.shard_elements * gradient_bytes
        return [
            Traffic("parameters", "all_gather", self.num_gathers, gathered, self.num_shards),
            Traffic("gradients", "reduce_scatter", self.num_units, reduced, self.num_shards),
            norm,
        ]


def _sharded(
    config: ModelConfig, shapes: Shapes, num_shards: int, num_microbatches: int
) -> _Sharded:
    inside = [shape for name, shape in shapes.items() if name.startswith("layers.")]
    total, layers = _shard(shapes.values(), num_shards), _shard(inside, num_shards)
    return _Sharded(
        num_shards=num_shards,
        num_units=config.num_layers + 1,
        shard_elements=total,
        num_gathers=num_microbatches * (2 * config.num_layers + 1),
        gathered_elements=num_microbatches * (total + layers),
    )


def _shapes(config: ModelConfig) -> Shapes:
    """The shape of every parameter by name, in the model's order; a tied table once."""
    with torch.device("meta"):
        model = build_model(config, SimpleNamespace())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _shard(shapes: Iterable[tuple[int, ...]], num_shards: int) -> int:
    """Elements of these parameters on a rank, padding included: a sum of s(u)."""
    return sum(-(-shape[0] // num_shards) * prod(shape[1:]) for shape in shapes)


def _buckets(shapes: list[tuple[int, ...]], width: int, bucket_bytes: tuple[int, int]) -> list[int]:
    """Bytes of every bucket, filled from the last parameter to the first."""
    buckets, filling = list[int](), 0
    for shape in reversed(shapes):
        filling += prod(shape) * width
        if filling >= bucket_bytes[bool(buckets)]:
            buckets.append(filling)
            filling = 0
    return [*buckets, filling] if filling else buckets
