"""The training command on several ranks takes the updates of one process, and says so once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reference import several_ranks
from reference.train_command import main

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--updates", "3", "--seed", "1"]


def launched(*arguments):
    """Two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "-m", "reference.train", *arguments]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )


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


def as_if_launched(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("is_launched", "arguments", "message"),
    [
        (False, ["--distribute", "ddp"], "python -m torch.distributed.run"),
        (True, ["--distribute", "no.such"], "no module with ROLES"),
        (True, ["--distribute", "json"], "no module with ROLES"),
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
