"""A checkpoint that is not exactly the expected one is refused, whatever is wrong with it."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint_runs import (
    CONFIG,
    FILES,
    SETTINGS,
    STACK,
    expected_of,
    fresh,
    hashed_again,
    rewritten,
    run_of,
    snapshot_of,
)

from reference.checkpoint import CheckpointError, expected, load, save
from reference.checkpoint.files import tensor_files
from reference.checkpoint.state import canonical_json
from reference.schedule import Schedule
from reference.train import initial_model
from reference.update import TrainState


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), snapshot_of(run_of(2)))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def refused(folder, says, want=None):
    """Loading is refused with these words, and no tensor is made before."""
    want, made, real = want or expected_of(), [], torch.empty
    with pytest.MonkeyPatch.context() as context, pytest.raises(CheckpointError, match=says):
        context.setattr(torch, "empty", lambda *a, **k: made.append(a) or real(*a, **k))
        load(folder, want)
    assert not made


def test_a_model_on_meta_says_what_is_expected_too(saved):
    model = initial_model(CONFIG, STACK, 0, "meta")
    training = TrainState(model, STACK.param_groups(model, SETTINGS.weight_decay))
    assert load(saved, expected(training)).counters.optimizer_steps == 2


@pytest.mark.parametrize(
    ("want", "says"),
    [
        (lambda: expected_of(fresh(replace(CONFIG, norm_epsilon=1e-5))), "another model: norm_eps"),
        (lambda: expected_of(fresh(replace(CONFIG, tied_head=False))), "another model: tied_head"),
        (lambda: replace(expected_of(), ties={}), "other ties: only saved lm_head.weight"),
        (
            lambda: replace(expected_of(), identity={"tokenizer": "c"}),
            "tokenizer is 'bbb.*' as saved and 'c' in this run",
        ),
        (lambda: replace(expected_of(), identity={"manifest": None}), "manifest is 'aaa.*and None"),
        (lambda: replace(expected_of(), identity={"code": "d"}), "code is None as saved and 'd'"),
        (
            lambda: expected(fresh(), replace(SETTINGS, weight_decay=0.2)),
            "other settings: weight_decay is 0.1 as saved and 0.2",
        ),
        (
            lambda: expected(fresh(), replace(SETTINGS, schedule=Schedule(2e-2, 1000, 100))),
            r"other settings: schedule: peak is 0\.01 as saved and 0\.02 in this run",
        ),
        (
            lambda: replace(expected_of(), weight_decays={"norm.weight": 0.0}),
            "other trained parameters",
        ),
    ],
)
def test_another_run_is_refused_and_told_what_differs(saved, want, says):
    refused(saved, says, want())


def test_another_dtype_is_refused(saved):
    training = fresh()
    training.model.double()
    refused(saved, r"other parameters: .* is 'F32 \[.*' as saved and 'F64", expected_of(training))


def test_a_rank_that_never_wrote_is_missed(folder):
    first = list(tensor_files(0, 2).values())
    rewritten(folder, lambda c: (c.update(world_size=2), c["ranks"].update({"0": first})))
    refused(folder, "model-00000-of-00002.safetensors.* of rank 0 were not written")
    rewritten(folder, lambda c: c["files"].update(dict.fromkeys(first, c["files"]["state.json"])))
    refused(folder, "does not hold model-00000-of-00002.safetensors")
    rewritten(folder, lambda c: c["ranks"].update({"0": c["ranks"]["0"], "1": ["x"]}))
    for name in first:
        (folder / name).write_bytes((folder / "state.json").read_bytes())
    refused(folder, "of 2 processes and has no file of rank 1")


def test_a_file_of_a_rank_that_is_not_there_is_missed(folder):
    (folder / "random-00000.safetensors").unlink()
    refused(folder, "does not hold random-00000.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_missed(folder, name):
    (folder / name).unlink()
    refused(folder, name)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_noticed(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 4
    (folder / name).write_bytes(data)
    refused(folder, f"{name} (was changed|is no JSON)")


def test_a_pickle_in_place_of_a_file_is_not_opened(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Explodes()))
    hashed_again(folder, "model.safetensors")
    rewritten(
        folder,
        lambda c: c["parts"].update(parameters=c["files"]["model.safetensors"]["sha256"]),
    )
    refused(folder, r"model\.safetensors is a pickle")


def test_a_pickle_beside_the_files_is_refused(folder):
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Explodes()))
    refused(folder, r"holds optimizer\.pt, which manifest\.json does not name")


class Explodes:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was executed",))


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_plain_file_is_refused(folder, kind):
    path = folder / "state.json"
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (folder.parent / "elsewhere").write_bytes(content)
        path.symlink_to(folder.parent / "elsewhere")
    else:
        path.mkdir()
    refused(folder, r"state\.json has -1 bytes")


def test_moments_that_were_not_saved_are_missed(tmp_path):
    snapshot = snapshot_of(run_of(2))
    snapshot.optimizer.clear()
    refused(save(tmp_path, snapshot), "run with updates and has no optimizer state")


def test_moments_of_another_shape_are_refused(tmp_path):
    snapshot = snapshot_of(run_of(2))
    adam = snapshot.optimizer["norm.weight"]
    adam.first_moment = torch.zeros(3)
    refused(save(tmp_path, snapshot), "another optimizer state than its parameters: norm.weight/f")


def test_a_part_in_the_manifest_that_is_not_the_state_s_is_refused(folder):
    rewritten(folder, lambda content: content["parts"].update(counters="0" * 64))
    refused(folder, r"counters in state\.json is not the one in manifest\.json")


def test_another_version_is_refused(folder):
    rewritten(folder, lambda content: content.update(version=2))
    refused(folder, "version 2; this program reads 'touchstone checkpoint', version 1")


WRONG_MANIFESTS = {
    "files are a list": lambda c: c.update(files=[]),
    "a file elsewhere": lambda c: c["files"].update({"../x": {"bytes": 1, "sha256": "0"}}),
    "a size in words": lambda c: c["files"].update({"state.json": {"bytes": "1", "sha256": "0"}}),
    "no record": lambda c: c["files"].update({"state.json": 7}),
    "no state": lambda c: c["files"].pop("state.json"),
    "no model": lambda c: c["files"].pop("model.safetensors"),
    "parts are a number": lambda c: c.update(parts=7),
    "no ranks": lambda c: c.update(ranks={}),
    "ranks are a list": lambda c: c.update(ranks=[["random-00000.safetensors"]]),
    "another world": lambda c: (c.update(world_size=2), c["ranks"].update({"1": ["x"]})),
    "a rank is a number": lambda c: c["ranks"].update({"0": 7}),
    "world size True": lambda c: c.update(world_size=True),
    "a huge world": lambda c: c.update(world_size=10**30),
    "nothing": lambda c: c.clear(),
}
WRONG_TENSORS = {
    "no layouts": lambda t: t.clear(),
    "no layout": lambda t: t["model.safetensors"].update({"norm.weight": "F32"}),
    "no dtype": lambda t: t["model.safetensors"].update({"norm.weight": ["F99", [8]]}),
    "a list for a dtype": lambda t: t["model.safetensors"].update({"norm.weight": [["F32"], [8]]}),
    "a huge shape": lambda t: t["model.safetensors"].update({"norm.weight": ["F32", [2**80]]}),
    "moments of nothing": lambda t: t["optimizer.safetensors"].update({"x": ["F32", [8]]}),
    "huge random": lambda t: t["random-00000.safetensors"].update({"x": ["U8", [2**80]]}),
    "huge and empty": lambda t: t["random-00000.safetensors"].update({"x": ["U8", [0, 2**80]]}),
}


@pytest.mark.parametrize("case", WRONG_MANIFESTS)
def test_a_manifest_that_is_wrong_and_hashed_is_refused(folder, case):
    rewritten(folder, WRONG_MANIFESTS[case])
    refused(folder, ".")


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_a_state_that_is_wrong_and_hashed_is_refused(folder, case):
    state = json.loads((folder / "state.json").read_bytes())
    WRONG_TENSORS[case](state["tensors"])
    (folder / "state.json").write_bytes(canonical_json(state))
    hashed_again(folder, "state.json")
    refused(folder, ".")


def test_a_random_state_that_is_no_bytes_is_refused(tmp_path):
    snapshot = snapshot_of(run_of(1))
    snapshot.random["cpu"] = torch.empty(0, 2**40, dtype=torch.uint8)
    refused(save(tmp_path, snapshot), r"random state cpu of U8 \[0, 1099511627776\]")


def test_what_is_nested_too_deep_to_be_spelled_is_refused(folder):
    text = (folder / "state.json").read_text()
    deep = "[" * 400 + "]" * 400
    (folder / "state.json").write_text(text.replace('"next_window": 7', f'"next_window": {deep}'))
    hashed_again(folder, "state.json")
    refused(folder, r"data in state\.json is not the one")


def test_no_folder_is_refused(tmp_path):
    refused(tmp_path / "absent", "absent is no folder: No such file")
    refused(tmp_path, r"has no manifest\.json: it is no complete checkpoint")
