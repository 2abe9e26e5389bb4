"""M2. A checkpoint gives back every part that was saved, and refuses to be anything else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gates import checkpoints, snapshots, toys
from gates.memory import peak_bytes, require_peak_bytes, reset_peak_bytes
from harness import gate, not_run
from reference.checkpoint import Expected, capture, expected, latest, restore
from reference.loss_scale import LossScaleState
from reference.update import TrainState

IDENTITY = {"manifest": "a" * 64, "tokenizer": "b" * 64, "code": "c" * 64, "evaluation": None}
POSITION = {"epoch": 1, "window": 2, "seed": 3, "rows_sha256": "d" * 64}
LOSS_SCALE = LossScaleState(scale=4096.0, good_updates=3, skipped_updates=4)
EXACT = "what is saved is what was there, bit for bit"


def captured(training, rng):
    """Everything that a snapshot can hold, a named generator that has been drawn from included."""
    sampler = torch.Generator().manual_seed(5)
    torch.rand(3, generator=sampler)
    torch.rand(2)
    training.loss_scale = LOSS_SCALE
    return capture(training, snapshots.SETTINGS, POSITION, IDENTITY, {"sampler": sampler})


def wanted(training, **changes) -> Expected:
    return replace(expected(training, snapshots.SETTINGS, IDENTITY), **changes)


@gate(
    claim="every part of a state comes back from the files: parameters, ties, moments and steps "
    "by name, settings, counters, position, generators, loss scale, identity",
    roles=["save", "load"],
    not_claimed="that a run goes on from it: m2_resume",
    source="issue 5; KempnerInstitute/KempnerForge PR#115: moments dropped without an error",
)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_round_trip(stack, head, rng, tmp_path, check):
    training = snapshots.trained(stack, rng, tied_head=head == "tied")
    snapshot = captured(training, rng)
    want = snapshots.parts(snapshot)
    stack.save(tmp_path / "run", snapshot, 2, 0)
    check("parts that saving changed", snapshots.differing(snapshots.parts(snapshot), want),
          equal=[], because="a snapshot is only read")  # fmt: skip
    torch.rand(7)  # the generators have moved on
    try:
        loaded, ended = stack.load(latest(tmp_path / "run"), wanted(training)), "loaded"
    except ValueError as error:
        loaded, ended = None, f"refused: {error}"
    check("outcome", ended, equal="loaded", because="it is what is expected")
    got = snapshots.parts(loaded)
    check("parts that differ", snapshots.differing(got, want), equal=[], because=EXACT)


@gate(
    claim="put into fresh objects, a checkpoint makes the same training state, its head tied by "
    "memory where it was",
    roles=["save", "load", "build_model"],
    not_claimed="shards of several processes",
    source="NVIDIA-NeMo/Automodel PR#2511: said to be tied, and two tensors after the load",
)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_restored(stack, head, rng, tmp_path, check):
    training = snapshots.trained(stack, rng, tied_head=head == "tied")
    training.loss_scale = LOSS_SCALE
    stack.save(tmp_path / "run", capture(training, snapshots.SETTINGS, POSITION, {}), 2, 0)
    want = snapshots.of_training(training)
    fresh = snapshots.trained(stack, rng, num_updates=1, tied_head=head == "tied")
    torch.rand(7)
    try:
        restore(stack.load(latest(tmp_path / "run"), expected(fresh)), fresh)
        ended = "restored"
    except ValueError as error:
        ended = f"refused: {error}"
    check("outcome", ended, equal="restored", because="the same configuration")
    differing = snapshots.differing(snapshots.of_training(fresh), want)
    check("parts that differ", differing, equal=[], because=EXACT)
    embedding, lm_head = fresh.model.embed_tokens.weight, fresh.model.lm_head.weight
    check("one memory", embedding.data_ptr() == lm_head.data_ptr(), equal=head == "tied",
          because="as in the run that was saved")  # fmt: skip
    update_both(stack, training, fresh)
    differing = snapshots.differing(snapshots.of_training(fresh), snapshots.of_training(training))
    check("parts that differ an update later", differing, equal=[],
          because="Adam's step and moments show in the next update")  # fmt: skip


def update_both(stack, one: TrainState, other: TrainState) -> None:
    """The same update of both."""
    for training in (one, other):
        snapshots.update(stack, training, torch.Generator().manual_seed(11))


def other_model(training):
    config = {**wanted(training).config, "rope_theta": 5e5}
    return wanted(training, config=config)


def fewer_parameters(training):
    expectation = wanted(training)
    left = dict(list(expectation.parameters.items())[:-1])
    return replace(expectation, parameters=left)


def half_parameters(training):
    parameters = {
        name: text.replace("F64", "F16").replace("F32", "F16")
        for name, text in wanted(training).parameters.items()
    }
    return wanted(training, parameters=parameters)


def other_settings(training):
    settings = replace(snapshots.SETTINGS, betas=(0.9, 0.999))
    return expected(training, settings, IDENTITY)


def identified(key):
    return lambda training: wanted(training, identity={**IDENTITY, key: "e" * 64})


# What is expected instead, and the word that the refusal must hold.
EXPECTATIONS = {
    "model": (other_model, "rope_theta"),
    "ties": (lambda training: wanted(training, ties={}), "lm_head.weight"),
    "parameters": (fewer_parameters, "norm.weight"),
    "dtype": (half_parameters, "F16"),
    "settings": (other_settings, "betas"),
    "tokenizer": (identified("tokenizer"), "tokenizer"),
    "manifest": (identified("manifest"), "manifest"),
}


@gate(
    claim="a checkpoint of another model, parameter set, dtype, tokenizer, data or settings is "
    "refused in words that say what differs",
    roles=["save", "load"],
    not_claimed="several ranks: m6_checkpoint",
    source="issue 5, point 3; vllm-project/speculators PR#900: another plan, resumed in silence",
)
@pytest.mark.parametrize("case", EXPECTATIONS)
def test_refused_expectation(stack, case, rng, tmp_path, check):
    training = snapshots.trained(stack, rng, num_layers=1)
    stack.save(tmp_path / "run", captured(training, rng), 2, 0)
    make, word = EXPECTATIONS[case]
    folder = latest(tmp_path / "run")
    ended = checkpoints.outcome(word, stack.load, folder, make(training))
    check("outcome", ended, equal=f"refused, naming {word}", because="it is of another run")


def changed_byte(folder: Path, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def cut_short(folder: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def unlinked(folder: Path, file: Path) -> None:
    file.unlink()


class Planted:
    """Executed when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def pickled(folder: Path, file: Path) -> None:
    file.write_bytes(pickle.dumps(Planted(folder.parent / "executed")))


def pickled_beside(folder: Path, file: Path) -> None:
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Planted(folder.parent / "executed")))


def edited_counters(folder: Path, file: Path) -> None:
    """One count changed in every JSON file, the files as long as before."""
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace('"optimizer_steps": 3', '"optimizer_steps": 2'))


def removed(folder: Path, file: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


# What is done to a folder, to which of its files, and the word that the refusal must hold.
DAMAGES = {
    "changed-byte": (changed_byte, "model*", "model"),
    "changed-moment": (changed_byte, "optimizer*", "optimizer"),
    "cut-short": (cut_short, "model*", "model"),
    "rank-missing": (unlinked, "random*", "random"),
    "optimizer-missing": (unlinked, "optimizer*", "optimizer"),
    "manifest-missing": (unlinked, "manifest*", "manifest"),
    "folder-missing": (removed, "*", "step-00000003"),
    "pickle": (pickled, "model*", "model"),
    "pickle-beside": (pickled_beside, "*", "optimizer.pt"),
    "edited": (edited_counters, "*", "changed"),
}


@gate(
    claim="a folder that lacks a file, or in which one byte was changed, or that holds a pickle, "
    "is refused, and nothing in it is executed",
    roles=["save", "load"],
    not_claimed="someone who changes the files and their checksums alike",
    source="nvidia-cosmos/cosmos-rl PR#550: valid because the configuration was there; issue 5",
)
@pytest.mark.parametrize("case", DAMAGES)
def test_refused_folder(stack, case, rng, tmp_path, check):
    training = snapshots.trained(stack, rng, num_layers=1)
    stack.save(tmp_path / "run", captured(training, rng), 2, 0)
    damage, pattern, word = DAMAGES[case]
    folder = latest(tmp_path / "run")
    files = sorted(folder.glob(pattern))
    if not files:
        not_run(f"The saved folder holds no {pattern}: this format is not that of the reference.")
    damage(folder, files[0])
    ended = checkpoints.outcome(word, stack.load, folder, wanted(training))
    check("outcome", ended, equal=f"refused, naming {word}", because="it is not what was saved")
    executed = (folder.parent / "executed").exists()
    check("code of the folder was executed", executed, equal=False, because="weights are data")


@gate(
    claim="refusing a damaged folder takes next to no memory",
    roles=["save", "load"],
    not_claimed="the memory of a load that succeeds",
    source="issue 5: no allocation over 64 MiB, so that a bad folder cannot end a process",
)
@pytest.mark.parametrize("case", ["model", "changed-byte"])
def test_memory(stack, case, rng, tmp_path, check):
    require_peak_bytes()
    changes = {"num_layers": 1, "vocabulary_size": 2**20}  # a table of 16 M values
    model = toys.tiny_model(stack, torch.device("cpu"), **changes).float()
    training = TrainState(model, stack.param_groups(model, snapshots.SETTINGS.weight_decay))
    stack.save(tmp_path / "run", capture(training, snapshots.SETTINGS, POSITION, IDENTITY), 1, 0)
    folder = latest(tmp_path / "run")
    expectation = wanted(training)
    if case == "model":
        expectation = other_model(training)
    else:
        changed_byte(folder, next(folder.glob("model*")))
    del model, training
    before_bytes = reset_peak_bytes()
    word = "rope_theta" if case == "model" else "model.safetensors"
    ended = checkpoints.outcome(word, stack.load, folder, expectation)
    peak_mib = (peak_bytes() - before_bytes) / 2**20
    check("outcome", ended, equal=f"refused, naming {word}", because="it is not what is expected")
    check("peak of a refusal", peak_mib, at_most=32.0, unit="MiB",
          because="the table alone has 64 MiB; a file is hashed in pieces")  # fmt: skip


@gate(
    claim="the newest checkpoints and every k-th stay, others go, the newest never",
    roles=["save", "load"],
    not_claimed="how much room there must be",
    source="issue 5, point 2: the last n and every k-th",
)
@pytest.mark.parametrize("last, every", [(1, 0), (2, 0), (2, 3), (3, 4)])
def test_retention(stack, last, every, rng, tmp_path, check):
    training = snapshots.trained(stack, rng, num_layers=1)
    snapshot = captured(training, rng)
    root = tmp_path / "run"
    for step in range(1, 8):
        at_step = replace(snapshot, counters=replace(snapshot.counters, optimizer_steps=step))
        stack.save(root, at_step, last, every)
        found = stack.load(latest(root), wanted(training)).counters.optimizer_steps
        check(f"step of the newest after the save at {step}", found, equal=step,
              because="the newest stays")  # fmt: skip
        kept = [n for n in range(1, step + 1) if n > step - last or (every and n % every == 0)]
        folders = sorted(int(path.name.rpartition("-")[2]) for path in root.glob("step-*"))
        check(f"steps kept after the save at {step}", folders, equal=kept,
              because=f"the last {last}, and multiples of {every} (0: none)")  # fmt: skip
    others = [path.name for path in root.iterdir() if not path.name.startswith("step-")]
    check("leftovers", others, equal=[], because="nothing went wrong")
