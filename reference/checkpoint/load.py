"""Loading a checkpoint that is exactly the expected one, or refusing it before it is allocated."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.files import (
    JSON_PARTS,
    LAYOUTS,
    MANIFEST,
    STATE,
    Manifest,
    Source,
    read_manifest,
    read_state,
    require_hash,
    tensor_files,
)
from reference.checkpoint.state import (
    Json,
    Snapshot,
    difference,
    layouts,
    model_config,
    named_tensors,
    settings_fields,
    weight_decays,
)
from reference.checkpoint.tensors import DTYPES, Layout, read_tensors, require_header, some
from reference.optimizer import AdamState
from reference.update import Counters, TrainState, UpdateSettings

# Resuming on another number of processes is "exact", "functional" or "refused".
OTHER_WORLD_SIZE = "refused"
_MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True)
class Expected:
    """What a checkpoint must be of.

    parameters: {name: dtype and shape}; identity: only the hashes under these keys are compared;
    settings None: not compared.
    """

    config: Json
    parameters: dict[str, str]
    ties: dict[str, str]
    weight_decays: dict[str, float]
    settings: Json | None = None
    identity: Mapping[str, str | None] = field(default_factory=dict)
    world_size: int = 1


def expected(
    training: TrainState,
    settings: UpdateSettings | None = None,
    identity: Mapping[str, str | None] | None = None,
) -> Expected:
    """What a checkpoint must be of to go on with `training`; its model may be on meta."""
    tensors, ties = named_tensors(training.model)
    return Expected(
        model_config(training.model),
        layouts(tensors),
        ties,
        weight_decays(training),
        None if settings is None else settings_fields(settings),
        dict(identity or {}),
    )


def load(directory: Path | str, expected: Expected) -> Snapshot:
    """The snapshot in `directory`, if it is whole and what `expected` says.

    In this order: the manifest, the size of every file, state.json, what was expected, the
    SHA-256 of every file (1 MiB at a time), the headers. Only then tensors are allocated.

    Raises CheckpointError (a ValueError) with the first difference; never anything else for what
    the folder holds. Another world size is refused in this version.
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
    try:
        manifest = read_manifest(source)
        if foreign := source.sizes().keys() - manifest.files.keys() - {MANIFEST}:
            raise CheckpointError(
                f"{source} holds {some(foreign)}, which {MANIFEST} does not name; move it elsewhere"
            )
        if manifest.world_size != expected.world_size:
            raise CheckpointError(
                f"{source} was saved by {manifest.world_size} processes, this run has "
                f"{expected.world_size}; resuming on another number is {OTHER_WORLD_SIZE} in this "
                "version"
            )
        state = read_state(source, manifest)
        tables = _tables(source, state, manifest)
        _require_expected(source, state, tables, expected)
        for name, record in manifest.files.items():
            require_hash(source, name, record)
        tensors = {}
        for part, name in tensor_files(0).items():
            with source.open(name) as file:
                require_header(file, f"{source}/{name}", tables[part])
        for part, name in tensor_files(0).items():
            with source.open(name) as file:
                tensors[part] = read_tensors(file, f"{source}/{name}", tables[part])
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return _snapshot(state, tensors)


def _tables(source: Source, state: Json, manifest: Manifest) -> dict[str, dict[str, Layout]]:
    """{part: {tensor: layout}} of the parts that are tensors, as state.json has them."""
    tables = {}
    for part, name in tensor_files(0).items():
        if name not in manifest.files or manifest.files[name].sha256 != manifest.parts.get(part):
            raise CheckpointError(f"{source} has no {name} that {MANIFEST} gives as its {part}")
        table = state[LAYOUTS].get(name)
        if not isinstance(table, dict):
            raise CheckpointError(f"{source}/{STATE} does not say what {name} holds")
        tables[part] = {tensor: _layout(source, tensor, table[tensor]) for tensor in table}
    return tables


def _layout(source: Source, tensor: str, entry: Any) -> Layout:
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list):
        dtype, shape = entry
        if (
            isinstance(dtype, str)
            and dtype in DTYPES
            and all(type(size) is int and size >= 0 for size in shape)
        ):
            return Layout(dtype, tuple(shape))
    raise CheckpointError(f"{source}/{STATE} says {entry!r} of {tensor}")


def _require_expected(
    source: Source, state: Json, tables: dict[str, dict[str, Layout]], expected: Expected
) -> None:
    identity = {key: state["identity"].get(key) for key in expected.identity}
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("another model", state["config"], expected.config),
        ("other ties", state["ties"], expected.ties),
        ("other parameters", _spelled(tables["parameters"]), expected.parameters),
        ("other trained parameters", state["weight_decays"], expected.weight_decays),
        ("other data, tokenizer or code", identity, expected.identity),
    ]
    if expected.settings is not None:
        pairs.append(("other settings", state["settings"], expected.settings))
    for what, saved, wanted in pairs:
        found = difference(saved, wanted)
        if found:
            raise CheckpointError(f"{source} is of {what}: {found}")
    _require_optimizer(source, state, tables)
    _require_random(source, tables["random"])


def _require_optimizer(source: Source, state: Json, tables: dict[str, dict[str, Layout]]) -> None:
    """Step and moments of trained parameters, and some if there was an update."""
    parameters, optimizer = tables["parameters"], tables["optimizer"]
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


def _require_random(source: Source, table: dict[str, Layout]) -> None:
    for name, layout in table.items():
        if layout.dtype != "U8" or len(layout.shape) != 1:
            raise CheckpointError(f"{source} has a random state {name} of {layout}, not of bytes")


def _spelled(table: dict[str, Layout]) -> dict[str, str]:
    return {name: str(layout) for name, layout in table.items()}


def _snapshot(state: Json, tensors: dict[str, dict[str, Tensor]]) -> Snapshot:
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
    )
