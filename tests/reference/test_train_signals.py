"""Real signals to real processes: they stop at the next update, or at once if told twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from reference.checkpoint.commit import latest
from reference.interruption import signals_asked_to_wait

COMMAND = [
    *(sys.executable, "-m", "reference.train", "--corpus", "python-docs", "--corpus-bytes"),
    *("200000", "--row-tokens", "32", "--updates", "60", "--checkpoint-every", "7", "--resume"),
]
TIMEOUT_S = 120
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# An update that takes longer than anybody waits.
SLOW = """
import time
from reference.interruption import signals_asked_to_wait
with signals_asked_to_wait() as interruption:
    print("ready", flush=True)
    until = time.monotonic() + 100
    while not interruption.has_come():
        time.sleep(0.01)
    print(interruption.name, flush=True)
    while time.monotonic() < until:
        pass
"""


def start(folder):
    return subprocess.Popen(
        [*COMMAND, "--checkpoints", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip


def wait_for(is_there):
    until = time.monotonic() + TIMEOUT_S
    while not is_there():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def last_line(process):
    out, err = process.communicate(timeout=TIMEOUT_S)
    return (out.splitlines() or [""])[-1], err


def model_bytes(folder):
    return {
        name: (folder / "step-00000060" / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors", "random-00000.safetensors")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the last line of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    line, err = last_line(process)
    assert (process.returncode, err) == (0, "")
    return model_bytes(folder), line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_saves_after_the_update_and_exits_75(tmp_path, number, whole):
    stopped = start(tmp_path)
    wait_for(lambda: latest(tmp_path))
    stopped.send_signal(number)
    line, err = last_line(stopped)
    assert (stopped.returncode, err) == (75, "")
    num_updates = int(latest(tmp_path).name.removeprefix("step-"))
    assert 7 <= num_updates < 60
    assert line == (
        f"{number.name}: stopped after {num_updates} updates, which are kept in {tmp_path}; go on "
        "with --resume"
    )
    resumed = start(tmp_path)
    assert last_line(resumed) == (whole[1], "") and resumed.returncode == 0
    assert model_bytes(tmp_path) == whole[0]


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path, whole):
    killed = start(tmp_path)
    wait_for(lambda: (tmp_path / "step-00000014").exists())
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    resumed = start(tmp_path)
    assert last_line(resumed) == (whole[1], "") and resumed.returncode == 0
    assert model_bytes(tmp_path) == whole[0]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(first, second):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"{first.name}\n"
    begun = time.monotonic()
    process.send_signal(second)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -second and time.monotonic() - begun < 10


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with signals_asked_to_wait() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(interruption.has_come)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_another_thread_is_refused():
    refused = []

    def enter():
        with pytest.raises(ValueError, match="main thread"), signals_asked_to_wait():
            pass
        refused.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert refused
