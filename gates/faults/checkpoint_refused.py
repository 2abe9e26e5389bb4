"""Loads that take a checkpoint they should refuse, or refuse it without a word of use."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from harness import benign, fault
from reference.checkpoint import Snapshot
from reference.optimizer import AdamState
from reference.update import Counters

FILE = "m2_checkpoint::"
MEMORY = f"{FILE}test_memory"


def expectations(*names):
    return [f"{FILE}test_refused_expectation[{name}]" for name in names]


def folders(*names):
    return [f"{FILE}test_refused_folder[{name}]" for name in names]


def read(folder):
    """The snapshot of a folder as its files have it, whatever a manifest says."""
    state = json.loads((folder / "state.json").read_text())
    state.pop("tensors")
    random = {
        name: tensor
        for file in folder.glob("random-*.safetensors")
        for name, tensor in load_file(file).items()
    }
    path, optimizer = folder / "optimizer.safetensors", {}
    moments = load_file(path) if path.exists() else {}
    for name in (key.removesuffix("/step") for key in moments if key.endswith("/step")):
        step, first, second = (
            moments[f"{name}/{what}"] for what in ("step", "first_moment", "second_moment")
        )
        optimizer[name] = AdamState(int(step), first, second)
    parameters = {name: x.clone() for name, x in load_file(folder / "model.safetensors").items()}
    counters = Counters(**state.pop("counters"))
    return Snapshot(
        **state, counters=counters, parameters=parameters, optimizer=optimizer, random=random
    )


def layouts(folder):
    """{parameter: its dtype and shape}, as a checkpoint's own file spells them."""
    table = json.loads((folder / "state.json").read_text())["tensors"]["model.safetensors"]
    return {name: f"{dtype} {shape}" for name, (dtype, shape) in table.items()}


def believing(reference, *names):
    """A load that does not compare these fields: it expects what is there."""

    def load(directory, expected):
        saved = json.loads((directory / "state.json").read_text())
        saved["parameters"] = layouts(directory)
        return reference.load(directory, replace(expected, **{name: saved[name] for name in names}))

    return load


@fault(role="load", caught_by=expectations("model"), seen_in="lyogavin/airllm PR#369")
def takes_another_model_of_the_same_shapes(reference):
    """Every tensor fits, so the configuration is not looked at."""
    return believing(reference, "config")


@fault(role="load", caught_by=expectations("ties"), seen_in="own")
def takes_other_ties(reference):
    """A head that was tied is loaded into a model in which it is not."""
    return believing(reference, "ties")


@fault(role="load", caught_by=expectations("parameters", "dtype"), seen_in="own")
def loads_what_fits(reference):
    """strict=False: names and dtypes that differ are passed over."""
    return believing(reference, "parameters")


@fault(role="load", caught_by=expectations("settings"), seen_in="vllm-project/speculators PR#900")
def takes_other_settings(reference):
    """Goes on with another schedule and other betas than those of the run."""
    return believing(reference, "settings")


@fault(role="load", caught_by=expectations("tokenizer", "manifest"), seen_in="own")
def takes_another_tokenizer_and_other_data(reference):
    """The hashes in the checkpoint are written, and never read."""
    return believing(reference, "identity")


EVERY_EXPECTATION = f"{FILE}test_refused_expectation"


@fault(role="load", caught_by=[EVERY_EXPECTATION, f"{FILE}test_refused_folder"], seen_in="own")
def refuses_without_saying_why(reference):
    """The refusal names nothing that differs."""

    def load(directory, expected):
        try:
            return reference.load(directory, expected)
        except ValueError:
            raise ValueError("incompatible checkpoint") from None

    return load


# --- what the folder holds -------------------------------------------------------------------


@fault(
    role="load",
    caught_by=folders("manifest-missing", "rank-missing", "optimizer-missing"),
    seen_in="nvidia-cosmos/cosmos-rl PR#550",
)
def takes_a_folder_that_has_its_configuration(reference):
    """A checkpoint is one when its state is there; what else is missing is left out."""
    return lambda directory, expected: read(directory)


@fault(role="load", caught_by=folders("changed-byte", "changed-moment", "edited"), seen_in="own")
def compares_sizes_only(reference):
    """Every file must have its size; its bytes are believed."""

    def load(directory, expected):
        manifest = json.loads((directory / "manifest.json").read_text())
        for name, record in manifest["files"].items():
            if (directory / name).stat().st_size != record["bytes"]:
                raise ValueError(f"{name} has another size")
        return read(directory)

    return load


@fault(role="load", caught_by=folders("cut-short", "pickle"), seen_in="own")
def breaks_in_the_library(reference):
    """A damaged file ends in whatever the library below raises."""
    return lambda directory, expected: read(directory)


@fault(role="load", caught_by=folders("pickle", "pickle-beside"), seen_in="own")
def unpickles_what_it_finds(reference):
    """Files that are pickles are read as such, and so executed, before the rest is judged."""

    def load(directory, expected):
        for file in directory.iterdir():
            content = file.read_bytes()
            if content.startswith(b"\x80"):
                pickle.loads(content)
        return reference.load(directory, expected)

    return load


@fault(role="load", caught_by=folders("pickle-beside"), seen_in="own")
def passes_over_foreign_files(reference):
    """Files that the manifest does not name are taken for none of its business."""

    def load(directory, expected):
        manifest = json.loads((directory / "manifest.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            for name in [*manifest["files"], "manifest.json"]:
                shutil.copy(directory / name, folder)
            return reference.load(Path(folder), expected)

    return load


@fault(role="load", caught_by=MEMORY, seen_in="own")
def reads_before_it_compares(reference):
    """All tensors are in memory before anything is compared."""

    def load(directory, expected):
        held = read(directory)
        snapshot = reference.load(directory, expected)
        del held
        return snapshot

    return load


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="load",
    accepted_by=[
        f"{FILE}test_round_trip",
        f"{FILE}test_restored",
        f"{FILE}test_retention",
        EVERY_EXPECTATION,
        f"{FILE}test_refused_folder",
        "m2_resume::test_resume[mid-epoch]",
        "m2_resume::test_resume[epoch-end]",
    ],
    because="a copy of a checkpoint is that checkpoint",
)
def loads_a_copy(reference):
    """The folder is copied to a local disk first."""

    def load(directory, expected):
        if not directory.exists():
            return reference.load(directory, expected)
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(directory, Path(folder) / directory.name)
            return reference.load(copy, expected)

    return load
