"""Gates that run ranks: options, cases, verdicts, evidence."""

import json
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import HEAD

from harness.launcher import Hosts, Launcher

GATE = """
import torch, torch.distributed as dist

def total(rank, stack):
    x = torch.tensor(float(stack.double(rank.index)))
    dist.all_reduce(x)
    return float(x)

@gate(claim="ranks add up", **about)
def test_total(stack, ranks, world_size, check):
    want = [float(world_size * (world_size - 1))] * world_size
    check("totals", ranks.run(total, world_size=world_size), equal=want, because="it is a sum")
"""
FAULT = """
@fault(role="double", caught_by="m6_toy::test_total[{case}]", seen_in="own")
def triples(reference):
    "Triples."
    return lambda x: 3 * x

@benign(role="double", accepted_by="m6_toy::test_total[2]", because="x + x is 2 x")
def adds(reference):
    "Adds."
    return lambda x: x + x
"""
MINE = "def double(x):\n    return x + x\n\nROLES = {'double': double}"


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Pytester forgets what its runs import, and would start a server in each of them."""
    Launcher(Hosts())


@pytest.fixture
def toy6(toy):
    toy.gates(GATE, "m6_toy")
    toy.faults(FAULT.format(case=2))
    return toy


def run(toy, *options, **how):
    return toy.run("m6_toy.py", *options, **how)


def test_a_gate_runs_in_one_to_four_ranks(toy6):
    assert run(toy6).ret == 0
    assert [record["case"] for record in toy6.evidence("gate")] == ["1", "2", "3", "4"]
    assert toy6.verdicts("fault") == ["FAIL"]
    assert toy6.verdicts("benign") == ["PASS"]
    (start,) = toy6.evidence("run")
    assert start["ranks"] == {
        "num": 4, "backend": "gloo", "num_hosts": 1, "host": 0, "timeout_s": 60.0,
    }  # fmt: skip
    assert "at most 4 on 1 host, backend gloo" in (toy6.folder / "report.html").read_text()


def test_fewer_ranks_leave_out_the_larger_cases(toy6):
    (toy6.path / "faults" / "toy.py").write_text(HEAD + FAULT.format(case=3))
    assert run(toy6, "--ranks", "2").ret == 0
    assert [record["case"] for record in toy6.evidence("gate")] == ["1", "2"]
    assert toy6.verdicts("fault") == []


def test_one_rank_proves_nothing(toy6):
    assert run(toy6, "--ranks", "1", "--no-faults").ret == 6
    one, two = toy6.evidence("gate")
    assert (one["verdict"], two["verdict"]) == ("PASS", "NOT_RUN")
    assert two["reason"] == "2 ranks are more than --ranks 1; give --ranks 2."


def test_a_call_in_a_rank_counts(toy6):
    toy6.candidate(MINE)
    assert run(toy6, "--candidate", "mine", "--no-faults").ret == 0
    assert all(record["called"] == ["double"] for record in toy6.evidence("gate"))


def test_a_role_that_no_rank_calls_was_not_on_trial(toy6):
    toy6.candidate(MINE.replace("ROLES = {", "ROLES = {'half': lambda x: x / 2, "))
    assert run(toy6, "--candidate", "mine", "--no-faults").ret == 6
    assert "No selected gate called the role half" in " ".join(toy6.end()["problems"])


def test_a_crash_in_a_rank_is_an_error(toy6):
    toy6.candidate("def double(x):\n    return 1 / 0\n\nROLES = {'double': double}")
    assert run(toy6, "--candidate", "mine", "--no-faults", "--ranks", "2").ret == 1
    assert toy6.verdicts() == ["ERROR", "ERROR"]
    record = toy6.evidence("gate")[1]
    assert "RanksFailed: of 2 ranks, rank" in record["reason"]
    assert "ZeroDivisionError" in record["reason"]
    assert 'mine.py", line 2, in double' in record["rank_logs"]
    assert "mine.py&#34;, line 2, in double" in (toy6.folder / "report.html").read_text()


@pytest.mark.parametrize("ci", ["", "true"])  # in CI pytest repeats what it can
def test_a_crash_is_told_once(toy6, monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    toy6.candidate("def double(x):\n    return 1 / 0\n\nROLES = {'double': double}")
    output = run(toy6, "--candidate", "mine", "--no-faults", "-k", "1").outlines
    assert sum("return 1 / 0" in line for line in output) == 1, "its traceback"
    assert sum("it issued 0 collectives" in line for line in output) == 2, "and under the table"
    assert not any("ranks.py" in line or "__tracebackhide__" in line for line in output)
    assert any(re.search(r"m6_toy.py:\d+: in the gate", line) for line in output)
    assert len(output) < 45
    assert "return 1 / 0" not in (toy6.folder / "summary.md").read_text()


def test_a_role_that_a_hung_rank_called_was_on_trial(toy6):
    toy6.candidate("def double(x):\n    import time; time.sleep(99)\n\nROLES = {'double': double}")
    run(toy6, "--candidate", "mine", "--no-faults", "-k", "1", "--rank-timeout", "1")
    assert toy6.evidence("gate")[0]["called"] == ["double"]
    assert "was not on trial" not in " ".join(toy6.end()["problems"])


def test_the_last_lines_say_in_how_many_ranks_gates_ran(toy6):
    result = run(toy6, "--ranks", "100", "--no-faults")
    assert "rung L0, in 1, 2, 3 and 4 ranks" in " ".join(result.outlines)


def test_a_variant_that_no_rank_can_find_is_an_error(toy6):
    hidden = "\nother, triples = triples, None"
    (toy6.path / "faults" / "toy.py").write_text(HEAD + FAULT.format(case=2) + hidden)
    assert run(toy6).ret == 1
    (record,) = toy6.evidence("fault")
    assert record["verdict"] == "ERROR"
    assert "declare it at the top of an importable module" in record["reason"]


def test_the_gate_may_choose_its_own_sizes(toy6):
    parametrised = '@pytest.mark.parametrize("world_size", [2, 3])\ndef test_total'
    toy6.gates(GATE.replace("def test_total", parametrised), "m6_toy")
    assert run(toy6).ret == 0
    assert [record["case"] for record in toy6.evidence("gate")] == ["2", "3"]


def test_under_xdist(toy6):
    assert run(toy6, "-n", "2", new_process=True).ret == 0
    assert toy6.verdicts() == ["PASS"] * 4


PRELOADED = """
import os, pathlib
from multiprocessing import forkserver

def preloaded(rank, stack):
    return "harness.rank_process" in pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text()

@gate(claim="a gate's fork server comes too late to be the ranks' one", **about)
def test_preloaded(stack, ranks, check):
    forkserver.set_forkserver_preload([])
    forkserver.ensure_running()
    found = ranks.run(preloaded, world_size=2)
    check("preloaded", found, equal=[True, True], because="a rank would import it for seconds")
"""


def test_no_gate_starts_the_fork_server_of_the_ranks(toy):
    toy.gates(PRELOADED, "m6_toy")
    assert run(toy, new_process=True).ret == 0
    assert toy.verdicts() == ["PASS"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "--ranks 0: give at least 1"),
        (["--rank-timeout", "0"], "give more than 0 seconds"),
        (["--rank-timeout", "nan"], "give more than 0 seconds"),
        (["--nnodes", "0"], "--nnodes 0: give at least 1"),
        (["--node-rank", "0"], "need --nnodes 2 or more"),
        (["--nnodes", "2"], "give each host its own number from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "2"], "give each host its own number from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0"], "give the HOST:PORT of host 0"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "here"], "give the HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "here:1", "--ranks", "3"],
         "--ranks 3: they cannot be dealt evenly to 2 hosts"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(toy6, options, words):
    result = run(toy6, *options)
    assert result.ret == 4
    assert words in " ".join(" ".join(result.outlines + result.errlines).split())


# --- nothing is left running ---------------------------------------------------------------

WAITING = """
import os, pathlib, time
import torch.distributed as dist

def wait(rank, stack, folder):
    pathlib.Path(folder, f"pid-{rank.index}").write_text(str(os.getpid()))
    if rank.index:
        time.sleep(100)
    dist.barrier()

@gate(claim="waits", **about)
def test_wait(stack, ranks, check):
    ranks.run(wait, os.getcwd(), world_size=2)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 2), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_run(toy, number, status):
    toy.gates(WAITING, "m6_toy")
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "m6_toy.py"], cwd=toy.path)
    files = [toy.path / f"pid-{index}" for index in range(2)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
    process.send_signal(number)
    assert process.wait(timeout=30) == status
    pids = [int(file.read_text()) for file in files]
    assert wait_until(lambda: not any(map(is_running, pids)), 10)
    if number != signal.SIGKILL:
        assert toy.end()["interrupted"]
    assert not multiprocessing.active_children()


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(holds, timeout_s):
    """Whether it came to hold in time."""
    end = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


# --- two hosts -----------------------------------------------------------------------------


@pytest.fixture
def hosts(toy6):
    """Starts two pytest runs as if on two hosts, and waits for both."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "pytest", "-q", "m6_toy.py", "--nnodes", "2"]
    command += ["--rdzv-endpoint", endpoint, "--ranks", "4", "--rank-timeout", "20"]

    def run(*options):
        runs = [
            subprocess.Popen(
                [*command, "--node-rank", str(index), "--evidence", f"host-{index}", *own],
                cwd=toy6.path,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index, own in enumerate(options)
        ]
        outputs = [run.communicate(timeout=120)[0] for run in runs]
        return [run.returncode for run in runs], outputs

    return run


def test_two_hosts_run_the_same_gates(toy6, hosts):
    statuses, outputs = hosts([], [])
    assert statuses == [0, 0], outputs
    for index in range(2):
        records = evidence_of(toy6, index)
        assert [r["case"] for r in records if r["kind"] == "gate"] == ["2", "4"]
        assert records[0]["ranks"]["host"] == index


def test_hosts_at_different_gates(toy6, hosts):
    statuses, outputs = hosts([], ["-k", "4"])
    assert statuses == [1, 1], outputs
    reason = " ".join(record.get("reason", "") for record in evidence_of(toy6, 0))
    assert "start every host with the same options" in reason


def test_a_rank_that_dies_on_the_other_host(toy6, hosts):
    death = "    if rank.index == 3: os.kill(os.getpid(), 9)\n    dist.all"
    toy6.gates("import os\n" + GATE.replace("    dist.all", death), "m6_toy")
    statuses, outputs = hosts(["-k", "4 and reference"], ["-k", "4 and reference"])
    assert statuses == [1, 1], outputs
    for index in range(2):
        (record,) = [r for r in evidence_of(toy6, index) if r["kind"] == "gate"]
        assert "of 4 ranks, rank 3 died" in record["reason"]
        assert "rank 3 died of signal 9 (SIGKILL)" in record["reason"]


def evidence_of(toy, index):
    lines = (toy.path / f"host-{index}" / "evidence.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
