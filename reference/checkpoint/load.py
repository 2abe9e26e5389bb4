"""Loading a checkpoint that is exactly the expected one, or refusing it before it is allocated."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from reference.checkpoint.description import (
    Json,
    difference,
    layouts,
    model_config,
    named_tensors,
    settings_fields,
    weight_decays,
)
from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.files import (
    JSON_PARTS,
    MANIFEST,
    TENSOR_PARTS,
    Source,
    read_manifest,
    read_state,
    require_hash,
    tensor_files,
)
from reference.checkpoint.peers import ALONE, Peers, peers_of
from reference.checkpoint.shards import Box, Shard, shards_of, whole, world_of
from reference.checkpoint.state import Snapshot
from reference.checkpoint.stored import Chunk, Tables, read, require_headers, tables, wholes
from reference.checkpoint.tensors import Layout, some
from reference.optimizer import AdamState
from reference.update import Counters, TrainState, UpdateSettings

_MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True)
class Expected:
    """What a checkpoint must be of, and what this rank takes of it.

    parameters: {name: dtype and shape of the whole}; identity: only the hashes under these keys are
    compared; settings None: not compared. shards: what this rank is to hold, whole parameters where
    it says nothing; world: of this run, as world_of gives it; peers: the ranks that load together.
    """

    config: Json
    parameters: dict[str, str]
    ties: dict[str, str]
    weight_decays: dict[str, float]
    settings: Json | None = None
    identity: Mapping[str, str | None] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    world: Json = field(default_factory=lambda: world_of({}, ALONE))
    peers: Peers = ALONE


def expected(
    training: TrainState,
    settings: UpdateSettings | None = None,
    identity: Mapping[str, str | None] | None = None,
) -> Expected:
    """What a checkpoint must be of to go on with `training`; its model may be on meta."""
    tensors, ties = named_tensors(training.model)
    peers = peers_of(training.group)
    return Expected(
        model_config(training.model),
        layouts(tensors),
        ties,
        weight_decays(training),
        None if settings is None else settings_fields(settings),
        dict(identity or {}),
        shards_of(tensors, peers),
        world_of(tensors, peers),
        peers,
    )


def resumption(saved: Json, ours: Json) -> str:
    """How a run goes on from a checkpoint: "exact" or "functional: " and why; worlds as world_of.

    Exact, bit for bit: on as many ranks, of the same mesh and placements. Parameters, moments,
    counters, loss scale, data position and the random state of every rank are those that were
    saved.

    Functional, with another number of ranks, mesh or placement: parameters and moments are
    distributed anew without a change of a bit, counters, loss scale and data position are those
    that were saved, so the run reads the tokens that it would have read. But sums over ranks are
    taken in another order. With another number of ranks, each goes on with the random state that
    it has: dropout drops others.

    Not at all: with another model, parameter set, dtype, tokenizer, data or settings, or without a
    file of any of the ranks that saved. `load` raises CheckpointError.
    """
    if saved == ours:
        return "exact"
    one, other = saved["world_size"], ours["world_size"]
    if one != other:
        return f"functional: {one} ranks saved it, {other} go on; random states are not taken over"
    return f"functional: another mesh or placement on {one} ranks"


def load(directory: Path | str, expected: Expected) -> Snapshot:
    """The snapshot in `directory`, if it is whole and what `expected` says.

    In this order: the manifest, the size of every file, state.json, what was expected, the
    SHA-256 of every file (PIECE_BYTES at a time), the headers. Only then tensors are allocated.

    All ranks of `expected.peers` call together; they share out the files to hash, and go on when
    all files are right. Each gets what it is to hold, however many ranks saved it, and its own
    random state if they were as many, else none; the world is that which saved: see `resumption`.

    Raises CheckpointError (a ValueError) with the first difference, the same on all ranks; never
    anything else for what the folder holds. MissingRankError if a rank does not come in time.
    """
    return load_from(LocalFolder(Path(directory)), expected)


@dataclass(frozen=True)
class LocalFolder:
    """A checkpoint's folder on a file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """The size of every file, -1 of what is none; CheckpointError if there is no folder."""
        sizes = {}
        try:
            for entry in os.scandir(self.path):
                status = entry.stat(follow_symlinks=False)
                # To open a pipe would wait for ever.
                sizes[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else -1
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{self.path} is no folder: {error.strerror}") from error
        return sizes

    def open(self, name: str) -> BinaryIO:
        """The file, open for reading."""
        return (self.path / name).open("rb")


def load_from(source: Source, expected: Expected) -> Snapshot:
    """As `load`, from any source."""
    found: list[tuple[Json, dict[str, Tables]]] = []
    expected.peers.agree(f"load {source}", lambda: found.append(_checked(source, expected)))
    state, parts = found[0]
    try:
        tensors = {part: read(source, *_chosen(source, part, parts[part], state, expected))
                   for part in TENSOR_PARTS}  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return _snapshot(state, tensors, expected)


def _chosen(
    source: Source, part: str, found: Tables, state: Json, expected: Expected
) -> tuple[Tables, dict[str, Box]]:
    """The files of a part that this rank reads, and what it takes of each tensor."""
    index, world_size = expected.peers.index, expected.peers.world_size
    if part == "random":
        own = tensor_files(index, world_size)[part]
        is_there = state["world"]["world_size"] == world_size
        table = found[own] if is_there else {}
        return {own: table}, {name: chunk.box for name, chunk in table.items()}
    boxes = {}
    for name, layout in wholes(source, found).items():
        parameter, _, what = name.rpartition("/") if part == "optimizer" else (name, "", "")
        is_shared_out = parameter in expected.shards and what != "step"
        boxes[name] = expected.shards[parameter].box if is_shared_out else whole(layout.shape)
    return found, boxes


def _checked(source: Source, expected: Expected) -> tuple[Json, dict[str, Tables]]:
    """state.json and the tables of each part; this rank looks at its share of the files."""
    peers = expected.peers
    try:
        manifest = read_manifest(source)
        if foreign := source.sizes().keys() - manifest.files.keys() - {MANIFEST}:
            raise CheckpointError(
                f"{source} holds {some(foreign)}, which {MANIFEST} does not name; move it elsewhere"
            )
        state = read_state(source, manifest)
        parts = {part: tables(source, state, manifest, part) for part in TENSOR_PARTS}
        _require_expected(source, state, parts, expected)
        ours = sorted(manifest.files)[peers.index :: peers.world_size]
        for name in ours:
            require_hash(source, name, manifest.files[name])
        for part in TENSOR_PARTS:
            require_headers(source, parts[part], set(ours))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return state, parts


def _require_expected(
    source: Source, state: Json, parts: dict[str, Tables], expected: Expected
) -> None:
    parameters = wholes(source, parts["parameters"])
    identity = {key: state["identity"].get(key) for key in expected.identity}
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("another model", state["config"], expected.config),
        ("other ties", state["ties"], expected.ties),
        ("other parameters", _spelled(parameters), expected.parameters),
        ("other trained parameters", state["weight_decays"], expected.weight_decays),
        ("other data, tokenizer or code", identity, expected.identity),
    ]
    if expected.settings is not None:
        pairs.append(("other settings", state["settings"], expected.settings))
    for what, saved, wanted in pairs:
        found = difference(saved, wanted)
        if found:
            raise CheckpointError(f"{source} is of {what}: {found}")
    _require_optimizer(source, state, parameters, wholes(source, parts["optimizer"]))
    for table in parts["random"].values():
        _require_random(source, table)


def _require_optimizer(
    source: Source, state: Json, parameters: dict[str, Layout], optimizer: dict[str, Layout]
) -> None:
    """Step and moments of trained parameters, and some if there was an update."""
    updated = {name.rpartition("/")[0] for name in optimizer}
    if state["counters"]["optimizer_steps"] > 0 and not updated:
        raise CheckpointError(f"{source} is of a run with updates and has no optimizer state")
    if untrained := updated - (parameters.keys() & state["weight_decays"].keys()):
        raise CheckpointError(f"{source} has an optimizer state of {some(untrained)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in updated:
        shapes[f"{name}/step"] = ()
        shapes |= {f"{name}/{moment}": parameters[name].shape for moment in _MOMENTS}
    found = difference({name: layout.shape for name, layout in optimizer.items()}, shapes)
    if found:
        raise CheckpointError(f"{source} has another optimizer state than its parameters: {found}")
    if any(optimizer[f"{name}/step"].dtype != "I64" for name in updated):
        raise CheckpointError(f"{source} has optimizer steps that are no whole numbers")


def _require_random(source: Source, table: dict[str, Chunk]) -> None:
    for name, layout in ((name, chunk.layout) for name, chunk in table.items()):
        if layout.dtype != "U8" or len(layout.shape) != 1:
            raise CheckpointError(f"{source} has a random state {name} of {layout}, not of bytes")


def _spelled(table: dict[str, Layout]) -> dict[str, str]:
    return {name: str(layout) for name, layout in table.items()}


def _snapshot(state: Json, tensors: dict[str, dict[str, Tensor]], expected: Expected) -> Snapshot:
    optimizer = tensors["optimizer"]
    names = [name.removesuffix("/step") for name in optimizer if name.endswith("/step")]
    return Snapshot(
        **{part: state[part] for part in JSON_PARTS if part != "counters"},
        parameters=tensors["parameters"],
        optimizer={
            name: AdamState(
                int(optimizer[f"{name}/step"]), *(optimizer[f"{name}/{what}"] for what in _MOMENTS)
            )
            for name in names
        },
        random=tensors["random"],
        counters=Counters(**state["counters"]),
        shards=expected.shards,
        peers=expected.peers,
    )
