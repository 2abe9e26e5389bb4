"""From sources to a folder of shards that says of every window where it came from.

    read -> exact duplicates -> near duplicates -> split by cluster -> tokenizer -> shards -> check

Each stage leaves its result in a working folder, so a preparation that was killed goes on, and the
folder that it makes is the same, byte for byte, also for another number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reference.checkpoint import disk
from reference.checkpoint.files import FileRecord
from reference.checkpoint.temporary import remove
from reference.data.acceptance import accept
from reference.data.checking import check_shards, unchecked
from reference.data.clean import CleanSettings
from reference.data.clustering import Assignment, assign
from reference.data.contamination import ContaminationSettings
from reference.data.ids import id_dtype_name
from reference.data.manifest import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardRecord,
    StepRecord,
    TokenizerRecord,
    manifest_bytes,
    read_manifest,
)
from reference.data.near_duplicates import MARGIN, DuplicateSettings
from reference.data.policy import PackingPolicy
from reference.data.reading import Read, read_sources, reading_results
from reference.data.records import slice_records, source_records
from reference.data.sources import Source, fingerprint
from reference.data.split import require_fraction
from reference.data.text_files import PART_BYTES
from reference.data.tokenizing import make_tokenizer, parse_tokenizer, tokenize
from reference.data.work import PolicyRefusedError, Workers, publish, working_folder
from reference.data.writing import SHARD_TOKENS, training_windows, write_file, write_shards
from reference.hf.folder import refuse_content, refuse_place

Progress = Callable[[str, int], None]
# Which files of this room, and which libraries, a step's result depends on.
STEPS = {
    "read": (
        (
            "sources",
            "source_folders",
            "text_files",
            "clean",
            "corpus",
            "language",
            "grammar",
            "reading",
        ),
        ("datasets", "pyarrow", "zstandard"),
    ),
    "duplicates": (
        (
            "shingles",
            "text_batches",
            "near_duplicates",
            "duplicate_sample",
            "clustering",
            "split",
        ),
        ("numpy", "rensa"),
    ),
    "tokenizer": (
        (
            "tokenizing",
            "bpe",
            "tokenizer",
            "json_tokenizer",
            "text_batches",
            "open_tokenizer",
            "ids",
            "acceptance",
        ),
        ("tokenizers",),
    ),
    "shards": (("writing", "shards", "manifest", "account"), ("pyarrow",)),
    "contamination": (("checking", "contamination", "shingles", "text_batches"), ("numpy",)),
}


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that decides what is written, but the sources.

    tokenizer: `bytes`, `characters`, `bpe:N` or a file; shard_tokens: a shard ends behind it;
    check_contamination: False leaves the check unfinished, and then nothing is trained on it.

    Raises ValueError for a validation_fraction that is not between 0 and 1.
    """

    policy: PackingPolicy
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    seed: int = 0
    clean: CleanSettings = field(default_factory=CleanSettings)
    duplicates: DuplicateSettings = field(default_factory=DuplicateSettings)
    contamination: ContaminationSettings = field(default_factory=ContaminationSettings)
    check_contamination: bool = True
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        require_fraction(self.validation_fraction)


def prepare(
    sources: list[Source],
    directory: Path | str,
    settings: PrepareSettings,
    num_workers: int = 1,
    progress: Progress = lambda stage, num_done: None,
) -> Manifest:
    """Writes the folder `directory`; returns its manifest, read back.

    progress(stage, more that is done: bytes, documents or tokens; 0 when the stage begins).

    Raises ValueError for sources and settings that cannot be, FolderTakenError (a ValueError) if
    there is something called `directory`, OSError if the disk is full or read-only. Nothing is
    there then. What was done stays in a working folder beside it, for the next attempt, but after a
    ValueError that none can help; PolicyRefusedError is one that another packing policy can.
    """
    directory = Path(directory).absolute()
    refuse_place(directory)
    workers = Workers(num_workers)
    with working_folder(directory, preparation_key(sources, settings)) as work:
        stages = _Stages(work, sources, settings, workers, progress)
        folder = work / "folder"
        manifest = stages.run(folder)
        write_file(folder / MANIFEST, manifest_bytes(manifest))
        read_back = read_manifest(folder)
        refuse_content(directory)
        with suppress(FileNotFoundError):
            disk.remove_folder(directory)  # an empty one
        publish(folder, directory)
        remove(work)
    return read_back


def preparation_key(sources: list[Source], settings: PrepareSettings) -> str:
    """SHA-256 of all that decides the stages' results: sources, settings, code and libraries. Not
    the packing policy: the manifest has it, and no stage before.
    """
    hashed = hashlib.sha256(repr(replace(settings, policy=PackingPolicy(1))).encode())
    for source in sources:
        hashed.update(fingerprint(source).encode())
    for name in STEPS:
        hashed.update(repr((_code(name), _libraries(name))).encode())
    given = parse_tokenizer(settings.tokenizer).given
    if given is not None:
        hashed.update(b"%d " % given.eos + given.file_bytes)
    return hashed.hexdigest()


@dataclass(frozen=True)
class _Stages:
    work: Path
    sources: list[Source]
    settings: PrepareSettings
    workers: Workers
    progress: Progress

    def run(self, folder: Path) -> Manifest:
        """Everything but the manifest, written into `folder`; the manifest."""
        settings, seed = self.settings, self.settings.seed
        self.progress("read", 0)
        read = read_sources(
            self.work, self.sources, settings.clean, seed, self.workers, self._says("read")
        )
        self.progress("duplicates", 0)
        assignment = assign(
            read, settings.duplicates, settings.validation_fraction, seed, self.workers,
            self._says("duplicates"),
        )  # fmt: skip
        self.progress("tokenizer", 0)
        tokenizer, made = make_tokenizer(settings.tokenizer, read, assignment)
        made["probes"] = accept(tokenizer, {}).probes
        self.progress("tokenize", 0)
        tokenize(read, assignment, tokenizer, self.workers, self._says("tokenize"))
        self.progress("shards", 0)
        remove(folder)
        disk.make_folder(folder)
        shards, files = write_shards(folder, read, assignment, settings.shard_tokens)
        try:
            windows = training_windows(folder, shards, self.sources, settings.policy)
        except ValueError as error:
            raise PolicyRefusedError(str(error)) from error
        files[TOKENIZER] = write_file(folder / TOKENIZER, tokenizer.file_bytes)
        dtype = id_dtype_name(tokenizer.vocabulary_size)
        found = unchecked()
        if settings.check_contamination:
            self.progress("check", 0)
            found = check_shards(
                self.work, folder, shards, tokenizer, dtype, settings.contamination, self.workers,
                self._says("check"),
            )  # fmt: skip
        record = TokenizerRecord(
            made.pop("kind"), tokenizer.sha256, tokenizer.vocabulary_size, tokenizer.eos, dtype
        )
        results = {
            "read": reading_results(read, self.sources),
            "duplicates": assignment.results,
            "tokenizer": made,
            "shards": {"training_windows": windows},
        }
        return self._manifest(folder, read, assignment, record, results, shards, files, found)

    def _says(self, stage: str) -> Callable[[int], None]:
        return lambda num_done: self.progress(stage, num_done)

    def _manifest(
        self,
        folder: Path,
        read: Read,
        assignment: Assignment,
        tokenizer: TokenizerRecord,
        results: dict[str, dict[str, Any]],
        shards: list[ShardRecord],
        files: dict[str, FileRecord],
        found: dict[str, Any],
    ) -> Manifest:
        settings = self.settings
        duplicates = {
            **asdict(settings.duplicates),
            "algorithm": "R-MinHash of rensa, LSH by bands, exact near the threshold",
            "exact_margin": MARGIN,
        }
        fraction = {"validation_fraction": settings.validation_fraction}
        parameters: dict[str, dict[str, Any]] = {
            "read": {**asdict(settings.clean), "part_bytes": PART_BYTES},
            "duplicates": {**duplicates, **fraction},
            "tokenizer": {"tokenizer": tokenizer.kind, "size": tokenizer.vocabulary_size},
            "shards": {"shard_tokens": settings.shard_tokens},
            "contamination": asdict(settings.contamination),
        }
        return Manifest(
            sources=source_records(self.sources, read, assignment),
            tokenizer=tokenizer,
            policy=settings.policy.to_json(),
            seed=settings.seed,
            steps=[
                StepRecord(
                    name, _code(name), _libraries(name), parameters[name], results.get(name, {})
                )
                for name in STEPS
            ],
            shards=shards,
            slices=slice_records(folder, shards),
            contamination=found,
            files=files,
        )


def _code(step: str) -> str:
    room = Path(__file__).parent
    contents = [(room / f"{name}.py").read_bytes() for name in STEPS[step][0]]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _libraries(step: str) -> dict[str, str]:
    return {name: version(name) for name in STEPS[step][1]}
