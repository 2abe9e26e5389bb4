"""What stops a preparation is said in one sentence, and so is what it leaves."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from prepared import content, lines, prepared, settings, text_folder, texts

from reference.checkpoint import disk
from reference.data.bpe import train_characters
from reference.data.manifest import read_manifest
from reference.data.policy import PackingPolicy
from reference.data.prepare import PrepareSettings, preparation_key, prepare
from reference.data.prepare_command import DEFAULT_WINDOW_TOKENS, main
from reference.data.sources import parse_sources
from reference.data.work import Workers, working_folder


@pytest.fixture
def folder(tmp_path):
    return text_folder(tmp_path / "source")


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", *map(str, arguments)])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def work_folders(tmp_path):
    return list(tmp_path.glob(".out.prepare-*"))


def test_windows_longer_than_the_training_text_are_refused(folder, tmp_path, capsys):
    said = refused(
        capsys, folder, "--out", tmp_path / "out", "--window-tokens", 90_000,
        "--validation-fraction", 0.3,
    )  # fmt: skip
    assert "no window of 90,000 tokens in train has a target" in said
    (work,) = work_folders(tmp_path)
    assert f"{work}: the same command goes on there, also with another packing policy" in said
    assert not (tmp_path / "out").exists()


def test_another_packing_policy_goes_on_with_what_was_done(folder, tmp_path):
    with pytest.raises(ValueError, match="no window of"):
        prepared(tmp_path / "out", folder, policy=PackingPolicy(90_000))
    stages = []
    prepare(
        parse_sources([str(folder)]),
        tmp_path / "out",
        settings(),
        progress=lambda stage, num_done: stages.append(stage) if num_done else None,
    )
    assert "duplicates" not in stages, "it was done"
    prepared(tmp_path / "fresh", folder)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert not work_folders(tmp_path)


def test_a_weight_of_a_source_without_a_window_is_refused(folder, tmp_path, capsys):
    (tmp_path / "few.jsonl").write_bytes(lines({"text": text[:9]} for text in texts(4, seed=3)))
    arguments = ["--out", tmp_path / "out", "--window-tokens", 512, "--validation-fraction", 0.3]
    said = refused(capsys, f"{folder}?weight=1", f"{tmp_path / 'few.jsonl'}?weight=3", *arguments)
    assert "source few.jsonl declares weight 3, and has no window of 512 tokens" in said
    assert "few.jsonl 0)" in said


def test_a_source_without_a_window_is_told_and_listed(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # workers of xdist have 80
    (tmp_path / "few.jsonl").write_bytes(lines({"text": text[:9]} for text in texts(4, seed=3)))
    arguments = [str(folder), str(tmp_path / "few.jsonl"), "--out", str(tmp_path / "out")]
    arguments += ["--window-tokens", "512", "--validation-fraction", "0.3"]
    assert main(["prepare", *arguments]) == 0
    assert "source few.jsonl has no window of 512 tokens" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "out"), "--windows", "0"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    (times,) = [row for row in rows if len(row) > 2 and row[1].strip().startswith("times each")]
    assert [cell.strip() for cell in times[2:4]] == ["1.00", "0.00"]
    (few,) = [row for row in rows if len(row) > 9 and row[1].strip() == "few.jsonl"]
    assert int(few[7]) + int(few[8]) == 40, "4 documents of 9 bytes and EOS"


@pytest.mark.parametrize("damage", [b'{"text": "a"', b'{"body": "a"}\n'])
def test_nothing_stays_of_a_run_that_was_refused_before_anything_was_read(damage, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(damage)
    said = refused(capsys, tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    assert "rows.jsonl line 1" in said and "goes on" not in said
    assert not work_folders(tmp_path)


def refusals(tmp_path):
    """{part of the sentence: arguments} of what no second attempt can help."""
    (tmp_path / "one.txt").write_text("a single document")
    (tmp_path / "empty.txt").write_text(" ")
    characters = train_characters([b"abc"])
    (tmp_path / "abc.json").write_bytes(characters)
    return {
        "no document is left": [tmp_path / "one.txt"],
        "is empty": [tmp_path / "source", tmp_path / "empty.txt"],
        "no token can hold": [tmp_path / "source", "--tokenizer", f"{tmp_path}/abc.json?eos=0"],
    }


@pytest.mark.parametrize("sentence", ["no document is left", "is empty", "no token can hold"])
def test_a_refusal_that_another_attempt_cannot_help_leaves_nothing(
    sentence, folder, tmp_path, capsys
):
    arguments = [*refusals(tmp_path)[sentence], "--validation-fraction", "0.3"]
    said = refused(capsys, *arguments, "--out", tmp_path / "out")
    assert sentence in said and "goes on" not in said
    assert not work_folders(tmp_path)


def test_the_folder_of_another_process_is_left_alone(folder, tmp_path, capsys):
    policy = PackingPolicy(DEFAULT_WINDOW_TOKENS)
    key = preparation_key(parse_sources([str(folder)]), PrepareSettings(policy))
    with working_folder(tmp_path / "out", key) as work:
        (work / "chunk-00000.text").write_text("half")
        said = refused(capsys, folder, "--out", tmp_path / "out")
        assert "another process prepares" in said and "goes on" not in said
        assert (work / "chunk-00000.text").read_text() == "half"


@pytest.mark.parametrize("number", [2, 7, 13])
def test_a_full_disk_is_said_with_the_file_and_the_folder_that_stays(
    number, folder, tmp_path, monkeypatch, capsys
):
    calls, write = [], disk.write

    def full(descriptor, data):
        calls.append(descriptor)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(disk, "write", full)
    arguments = ["--window-tokens", "64", "--validation-fraction", "0.3", "--tokenizer", "bpe:300"]
    assert main(["prepare", str(folder), "--out", str(tmp_path / "out"), *arguments]) == 1
    (work,) = work_folders(tmp_path)
    said = capsys.readouterr().err
    assert f"No space left on device: '{work}/" in said
    assert f"{work}: the same command goes on there" in said


def interrupted(arguments, is_time, signals=(signal.SIGINT,), seconds=120):
    """(exit status, what it said) of a command whose process group gets these signals."""
    process = subprocess.Popen(
        [sys.executable, "-m", "reference.data", "prepare", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + seconds
    while not is_time(process):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    for number in signals:
        os.killpg(process.pid, number)
    said = process.communicate(timeout=60)[1].decode()
    return process.returncode, said.splitlines()


def test_ctrl_c_is_one_line_while_the_libraries_are_imported(folder, tmp_path):
    def is_importing(process):
        maps = f"/proc/{process.pid}/maps"
        return os.path.exists(maps) and "numpy" in open(maps).read()

    status, said = interrupted([folder, "--out", tmp_path / "out"], is_importing)
    assert (status, said) == (130, ["stopped before anything was done"])


@pytest.mark.parametrize(
    ("signals", "want"), [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)]
)
def test_a_signal_to_the_group_is_one_line_that_says_how_to_go_on(signals, want, tmp_path):
    rows = [{"text": text} for text in texts(9_000, num_words=300)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    status, said = interrupted(
        [tmp_path / "rows.jsonl", "--out", tmp_path / "out", "--workers", "2"],
        lambda process: list(tmp_path.glob(".out.prepare-*/chunk-00000.parquet")),
        signals,
    )
    assert status == want, said
    (line,) = said
    assert line.startswith("stopped; ") and "the same command goes on there" in line


def die(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)


def test_a_worker_that_dies_is_said_and_nobody_waits_for_the_others():
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="a worker process died"):
        list(Workers(2).map(die, range(20)))
    assert time.monotonic() - begin < 15, "the tasks that wait would take longer"


def test_a_bpe_that_found_too_few_pairs_is_told(folder, tmp_path, capsys):
    arguments = [
        "--window-tokens",
        "64",
        "--validation-fraction",
        "0.3",
        "--near-duplicates",
        "all",
    ]
    out = tmp_path / "out"
    tokenizer = ["--tokenizer", "bpe:60000"]
    assert main(["prepare", str(folder), "--out", str(out), *arguments, *tokenizer]) == 0
    size = read_manifest(out).tokenizer.vocabulary_size
    assert f"the BPE has {size:,} tokens, not 60,000" in capsys.readouterr().out


def test_inspect_refuses_what_it_cannot_do_before_it_reads(tmp_path, capsys):
    for arguments, message in (
        (["--windows", "-1"], "no whole number of at least 0"),
        (["--drawing", str(tmp_path / "nowhere" / "a.png")], "to draw into"),
    ):
        with pytest.raises(SystemExit):
            main(["inspect", str(tmp_path), *arguments])
        assert message in capsys.readouterr().err


def test_numbers_are_not_cut_where_there_is_little_room(folder, tmp_path, capsys, monkeypatch):
    prepared(tmp_path / "out", folder)
    num_bytes = f"{read_manifest(tmp_path / 'out').sources[0].num_bytes:,}"
    for columns in (None, "60"):
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        assert main(["inspect", str(tmp_path / "out")]) == 0
        said = capsys.readouterr().out
        assert "…" not in said
        assert columns or num_bytes in said
