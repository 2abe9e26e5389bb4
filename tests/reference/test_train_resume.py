"""A run that was stopped and resumed is bit for bit the one that was not."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from data_folders import write_folder

from reference.checkpoint.commit import latest
from reference.checkpoint.load import expected
from reference.checkpoint.state import digests
from reference.config import preset
from reference.data.loader import Loader, LoaderSettings
from reference.data.pack import pack
from reference.data.policy import PackingPolicy
from reference.data.training_text import Windows
from reference.data.windows import SplitWindows
from reference.resume import Checkpoints
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import initial_model, train
from reference.update import TrainState, UpdateSettings

STACK = SimpleNamespace(**ROLES)
SETTINGS = UpdateSettings(Schedule(1e-2, 1200, 200, 400))
CONFIG = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=1)
NUM_UPDATES = 12


def windows(num_updates=NUM_UPDATES, seed=1):
    """Epochs of 5 windows of 3 or fewer microbatches."""
    text = torch.randint(257, (8 * 27 + 1,), generator=torch.Generator().manual_seed(0))
    return Windows(pack([text], 8, "drop"), seed, num_updates, 2, 3)


def split_of(folder):
    """Windows of two sources, read from a folder."""
    sources = [[[b"a first source " * 10, b"and more"]], [[b"and a second one " * 5]]]
    texts = {"train": sources, "validation": [[[b"held out"]]]}
    return SplitWindows(folder, write_folder(folder, texts, PackingPolicy(8)), "train")


def loader(split):
    """Whose workers are as many updates ahead as come between two saves, and more."""
    return Loader(split, LoaderSettings(1, NUM_UPDATES, 2, 3, num_workers=2), STACK)


def run(
    folder, source=None, stack=STACK, settings=SETTINGS, device="cpu", total_tokens=None, **options
):
    checkpoints = Checkpoints(folder, **{"every": 3, "keep_last": 20, **options})
    return train(
        CONFIG, stack, windows() if source is None else source, settings, 0, device, total_tokens,
        checkpoints=checkpoints,
    )  # fmt: skip


def stop_after(num_windows):
    calls = iter(range(1, 1000))
    return lambda: next(calls) == num_windows


def all_digests(folder, stack=STACK):
    model = initial_model(CONFIG, stack, 0)
    training = TrainState(model, stack.param_groups(model, SETTINGS.weight_decay))
    return {
        file.name: digests(stack.load(file, expected(training)))
        for file in sorted(folder.glob("step-*"))
    }


class Dropout(torch.nn.Module):
    """Drops from torch's global generator, and counts on it."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config, self.stack = model, model.config, model.stack

    @property
    def lm_head(self):
        return self.inner.lm_head

    def forward(self, *inputs):
        return torch.nn.functional.dropout(self.inner(*inputs), 0.2)


WITH_DROPOUT = SimpleNamespace(
    **{**ROLES, "build_model": lambda c, s: Dropout(ROLES["build_model"](c, s))}
)


@pytest.mark.parametrize("stack", [STACK, WITH_DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("ahead", [False, True], ids=["direct", "workers"])
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_stopped_at_any_update_and_resumed_it_is_the_same_run(tmp_path, stack, ahead, background):
    split = split_of(tmp_path / "data")

    def source():
        return loader(split) if ahead else windows()

    torch.manual_seed(3)
    whole = run(tmp_path / "whole", source(), stack, background=background)
    wanted = all_digests(tmp_path / "whole", stack)
    assert list(wanted) == ["step-00000003", "step-00000006", "step-00000009", "step-00000012"]
    for place in (2, 5, 8):  # inside the first epoch, at its end, inside the second one
        folder = tmp_path / str(place)
        torch.manual_seed(3)
        first = run(folder, source(), stack, stop=stop_after(place), background=background)
        assert first.stopped and len(first.records) == place
        torch.manual_seed(4)  # which the checkpoint must undo
        second = run(folder, source(), stack, resume=True, background=background)
        assert not second.stopped
        assert first.records + second.records == whole.records
        got = all_digests(folder, stack)
        assert {name: got[name] for name in wanted} == wanted
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_on_a_gpu_in_deterministic_mode_it_is_the_same_run(tmp_path, monkeypatch, background):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    how = {"stack": WITH_DROPOUT, "device": "cuda", "background": background}
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(3)
        whole = run(tmp_path / "whole", **how)
        torch.manual_seed(3)
        first = run(tmp_path / "half", stop=stop_after(8), **how)
        torch.manual_seed(4)
        second = run(tmp_path / "half", resume=True, **how)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.records + second.records == whole.records
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))
    with pytest.raises(ValueError, match=r"random states were saved of cpu, cuda:0"):
        run(tmp_path / "half", resume=True, stack=WITH_DROPOUT)


def test_it_can_be_stopped_and_resumed_after_every_window(tmp_path):
    whole = run(tmp_path / "whole")
    records = []
    for _ in range(NUM_UPDATES):
        records += run(tmp_path / "steps", stop=stop_after(1), resume=True).records
    assert records == whole.records
    got, wanted = all_digests(tmp_path / "steps"), all_digests(tmp_path / "whole")
    assert {name: got[name] for name in wanted} == wanted


def test_a_run_that_died_goes_on_from_its_last_checkpoint(tmp_path):
    whole = run(tmp_path / "whole")
    calls = iter(range(1000))

    def dies_inside_the_second_window_after_a_save(*arguments):
        if next(calls) == 4:
            ROLES["accumulate"](*arguments)
            raise KeyboardInterrupt
        return ROLES["accumulate"](*arguments)

    stack = SimpleNamespace(**{**ROLES, "accumulate": dies_inside_the_second_window_after_a_save})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "dead", stack=stack)
    assert latest(tmp_path / "dead").name == "step-00000003"
    assert run(tmp_path / "dead", resume=True).records == whole.records[3:]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(tmp_path)
    before = all_digests(tmp_path)
    assert run(tmp_path, resume=True).records == []
    assert all_digests(tmp_path) == before


def test_a_run_that_has_its_tokens_draws_no_window_after_a_resume(tmp_path):
    whole = run(tmp_path, total_tokens=144)
    source = windows()
    assert run(tmp_path, source, total_tokens=144, resume=True).records == []
    assert source.state_dict()["window"] == 3 and len(whole.records) == 3


def test_windows_that_were_skipped_since_the_last_save_are_read_again(tmp_path):
    def clip(*arguments):
        norm = ROLES["clip_grad_norm"](*arguments)
        return norm * (float("nan") if calls.pop(0) in (4, 5) else 1)

    stack = SimpleNamespace(**{**ROLES, "clip_grad_norm": clip})
    calls = list(range(1, 13))
    whole = run(tmp_path / "whole", stack=stack)
    assert [bool(record.skipped) for record in whole.records[2:6]] == [False, True, True, False]
    calls = list(range(1, 6))
    run(tmp_path / "half", stack=stack, stop=stop_after(5))
    assert [file.name for file in (tmp_path / "half").glob("step-*")] == ["step-00000003"]
    calls = list(range(4, 13))
    rest = run(tmp_path / "half", stack=stack, resume=True).records
    assert list(map(repr, rest)) == list(map(repr, whole.records[3:]))  # a nan equals nothing


def test_retention_and_the_save_at_the_end(tmp_path):
    run(tmp_path, every=2, keep_last=1, keep_every=5, source=windows(11))
    assert sorted(file.name for file in tmp_path.glob("step-*")) == [
        "step-00000010",
        "step-00000011",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": windows(seed=2)}, "seed 1, here 2"),
        ({"settings": replace(SETTINGS, max_norm=2.0)}, "max_norm"),
        (
            {"settings": replace(SETTINGS, schedule=Schedule(1e-2, 1201, 200, 400))},
            "schedule: total_tokens is 1200 as saved and 1201 in this run",
        ),
        ({"identity": {"manifest": "b"}}, "manifest"),
        ({"identity": {"manifest": "a", "tokenizer": "b"}}, "tokenizer"),
        ({"generators": {"sampler": torch.Generator()}}, "generator:sampler"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_stays(tmp_path, change, message):
    run(tmp_path, identity={"manifest": "a"})
    before = all_digests(tmp_path)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **{"identity": {"manifest": "a"}, **change}, resume=True)
    assert all_digests(tmp_path) == before


def test_other_code_is_warned_of(tmp_path):
    run(tmp_path, identity={"code": "a"})
    with pytest.warns(UserWarning, match="step-00000012 was saved by other code"):
        run(tmp_path, identity={"code": "b"}, resume=True)


def test_a_directory_with_checkpoints_is_refused_without_resume(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="step-00000012 is there already; resume from it"):
        run(tmp_path)


def test_windows_without_a_position_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"needs windows with state_dict .* got list"):
        run(tmp_path, list(windows()))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep_last": 0}, {"keep_every": -1}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"every and keep_last must be >= 1"):
        Checkpoints("x", **{"every": 1, **wrong})


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_save_that_fails_ends_the_run(tmp_path, background):
    def save(root, snapshot, keep_last, keep_every):
        raise OSError(28, "No space left on device")

    stack = SimpleNamespace(**{**ROLES, "save": save})
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, stack=stack, background=background)


def test_a_directory_that_cannot_be_is_seen_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("in the way")
    source = windows()
    with pytest.raises(FileExistsError):
        run(tmp_path / "file", source)
    assert source.state_dict()["window"] == 0


def test_checkpoints_do_not_change_a_run(tmp_path):
    plain = train(CONFIG, STACK, windows(), SETTINGS)
    assert list(map(asdict, run(tmp_path, every=1).records)) == list(map(asdict, plain.records))
