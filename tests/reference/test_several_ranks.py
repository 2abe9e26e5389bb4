"""The training command on several ranks takes the updates of one process, and says so once."""

import json

import pytest
import torch
from launched_ranks import launched
from safetensors.torch import load_file

from reference import several_ranks
from reference.checkpoint import latest
from reference.stack import ROLES
from reference.train_command import main

SMALL = ["--updates", "3", "--seed", "1"]


@pytest.mark.parametrize("name", ["reference", "fsdp2"])
def test_two_ranks_train_the_model_of_one_process(name, tmp_path, capsys):
    arguments = [*SMALL, "--lora-rank", "2"] if name == "reference" else SMALL
    assert main([*arguments, "--export", str(tmp_path / "one")]) == 0
    want = capsys.readouterr().out.splitlines()
    ran = launched(*arguments, "--export", str(tmp_path / "two"), "--distribute", name)
    assert ran.returncode == 0, ran.stderr
    got = ran.stdout.splitlines()
    assert got[:2] == want[:2] and len(got) == 3
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[key], two[key], atol=1e-4) for key in one)


SHORT = [*SMALL, "--corpus", "python-docs", "--corpus-bytes", "60000", "--row-tokens", "32"]
DEGREE = "--data-parallel-shard-degree"


def test_two_replicas_of_two_shards_print_the_losses_of_one_process(tmp_path, capsys):
    """And what they saved, with its mesh, goes on as one copy over the same ranks."""
    assert main(SHORT) == 0
    want = capsys.readouterr().out.splitlines()
    arguments = [*SHORT, "--distribute", "fsdp2", "--checkpoint-activations",
                 "--checkpoints", str(tmp_path)]  # fmt: skip
    ran = launched(*arguments, DEGREE, "2", num_ranks=4)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == want
    state = json.loads((latest(tmp_path) / "state.json").read_text())
    assert state["world"]["mesh"] == {"('replicate', 'shard')": [2, 2]}
    resumed = launched(*arguments, "--resume", num_ranks=4)
    assert resumed.returncode == 0, resumed.stderr
    first, last = resumed.stdout.splitlines()
    assert first.endswith("functional: another mesh or placement on 4 ranks")
    assert last == want[-1]


def test_a_rank_computes_in_the_dtype_asked_for_and_keeps_float32(monkeypatch):
    """One rank, which needs no launcher but its variables."""
    as_if_launched(monkeypatch, world_size=1, MASTER_ADDR="localhost", MASTER_PORT="0")
    used, kept = set(), set()

    def linear(x, weight, bias):
        used.add((x.dtype, weight.dtype))
        return reference_linear(x, weight, bias)

    def optimizer_step(groups, *others):
        parameters = [p for group in groups for p in group["params"]]
        kept.update((p.dtype, p.grad.dtype) for p in parameters)
        return reference_step(groups, *others)

    reference_linear, reference_step = ROLES["linear"], ROLES["optimizer_step"]
    monkeypatch.setitem(ROLES, "linear", linear)
    monkeypatch.setitem(ROLES, "optimizer_step", optimizer_step)
    arguments = [*SHORT, "--distribute", "fsdp2", "--compute-dtype", "bfloat16"]
    assert main(arguments) == 0
    assert used == {(torch.bfloat16, torch.bfloat16)}
    assert kept == {(torch.float32, torch.float32)}


def as_if_launched(monkeypatch, world_size=2, **more):
    values = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", **more}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("is_launched", "arguments", "message"),
    [
        (False, ["--distribute", "ddp"], "python -m torch.distributed.run"),
        (True, ["--distribute", "no.such"], "no module with ROLES"),
        (True, ["--distribute", "json"], "no module with ROLES"),
        (False, [DEGREE, "2"], "--data-parallel-shard-degree needs several ranks; start them"),
        (True, [DEGREE, "3"], "3 does not divide the 2 ranks; choose one of 1, 2, or start"),
        (True, [DEGREE, "4"], "4 does not divide the 2 ranks"),
        (True, ["--distribute", "ddp", DEGREE, "2"], "2 of 2 ranks: --distribute ddp keeps a copy"),
        (True, [DEGREE, "1"], "1 of 2 ranks: --distribute reference keeps a copy"),
    ],
)
def test_bad_input_is_named_and_exits_2(is_launched, arguments, message, monkeypatch, capsys):
    if is_launched:
        as_if_launched(monkeypatch)
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_without_a_backend_here_is_refused(monkeypatch):
    as_if_launched(monkeypatch)
    monkeypatch.setattr(several_ranks.dist, "is_backend_available", lambda backend: False)
    with (
        pytest.raises(ValueError, match="no backend for ranks on cpu"),
        several_ranks.joined(None, torch.device("cpu")),
    ):
        pass


CHECKPOINTED = ["--corpus", "python-docs", "--corpus-bytes", "60000", "--row-tokens", "32",
                "--updates", "12", "--checkpoint-every", "5", "--resume"]  # fmt: skip
# One rank is told to stop after its third update, as a signal would tell it.
SIGNALLED = """
import os, signal
from reference import resume
from reference.train_command import main
real, counted = resume.Keeper.after_window, []
def after_window(keeper):
    counted.append(1)
    if len(counted) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return real(keeper)
resume.Keeper.after_window = after_window
raise SystemExit(main())
"""


def test_a_signal_to_one_rank_stops_all_after_the_same_update(tmp_path):
    """And the run that goes on is the one that was never stopped, bit for bit."""
    whole = launched(*CHECKPOINTED, "--checkpoints", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    program = tmp_path / "signalled.py"
    program.write_text(SIGNALLED)
    stopped = launched(*CHECKPOINTED, "--checkpoints", str(tmp_path / "run"), program=[program])
    assert "a signal to another rank: stopped after 3 updates" in stopped.stdout, stopped.stderr
    assert "exitcode  : 75" in stopped.stderr  # the launcher may end the other one as it exits
    assert latest(tmp_path / "run").name == "step-00000003"
    resumed = launched(*CHECKPOINTED, "--checkpoints", str(tmp_path / "run"))
    assert f"resuming from {tmp_path / 'run' / 'step-00000003'}, exact" in resumed.stdout
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    names = {file.name for file in latest(tmp_path / "whole").iterdir()}
    assert len(names) == 8
    for name in names:
        one, other = (latest(tmp_path / folder) / name for folder in ("whole", "run"))
        assert one.read_bytes() == other.read_bytes(), name


def test_one_process_goes_on_with_what_two_ranks_saved(tmp_path, capsys):
    kept = ["--checkpoints", str(tmp_path)]
    first = launched(*CHECKPOINTED, *kept)
    assert first.returncode == 0, first.stderr
    assert main([*CHECKPOINTED, *kept]) == 0
    told = capsys.readouterr().out.splitlines()
    where = tmp_path / "step-00000012"
    assert told[0].startswith(f"resuming from {where}, functional: 2 ranks saved it, 1 go on")
    assert told[1] == first.stdout.splitlines()[-1]
