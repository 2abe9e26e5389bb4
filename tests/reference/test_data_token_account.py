"""The account that inspect prints is that of the windows as they are read, and must add up."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from data_folders import write_folder

from reference.data import account as account_module
from reference.data import token_account as module
from reference.data.account import account, row_targets
from reference.data.labels import make_labels
from reference.data.manifest import TRAIN, VALIDATION
from reference.data.policy import CHOICES, PackingPolicy, apply_policy
from reference.data.prepare_command import main
from reference.data.token_account import disagreements, token_accounts
from reference.data.windows import SplitWindows
from reference.window import NO_TARGET

TEXTS = {
    TRAIN: [[[b"a first source, " * 5, b"", b"x"], [b"and its second shard"]], [[b"another"] * 3]],
    VALIDATION: [[[b"held out", b"also this"]]],
}
NUM_TOKENS = {TRAIN: 5 * 16 + 1 + 20 + 3 * 7 + 7, VALIDATION: 8 + 9 + 2}  # with an EOS a document
POLICIES = [
    {"boundary": boundary, "eos": eos, "tail": tail}
    for boundary, eos, tail in product(*(CHOICES[name] for name in ("boundary", "eos", "tail")))
]


def counted(folder, manifest, split, policy):
    """(targets, windows) of a split as a model is given them."""
    windows = SplitWindows(folder, manifest, split, policy)
    rows = windows.read(torch.arange(windows.num_windows))
    labels = apply_policy(rows, policy, windows.eos, make_labels).labels
    return int((labels != NO_TARGET).sum()), windows.num_windows


@pytest.mark.parametrize("words", POLICIES, ids=lambda words: "-".join(words.values()))
def test_it_is_the_account_of_the_windows_and_adds_up(tmp_path, words):
    policy = PackingPolicy(6, **words)
    manifest = write_folder(tmp_path, TEXTS, policy)
    found = token_accounts(manifest, tmp_path)
    assert not disagreements(found)
    for one, own in zip(found, (policy, policy.for_evaluation()), strict=True):
        assert one.num_read == NUM_TOKENS[one.split]
        assert one.num_read == one.num_targets + sum(one.left_out.values())
        targets = one.num_targets + one.num_repeated
        assert (targets, one.num_windows) == counted(tmp_path, manifest, one.split, own)
        declared = " ".join(one.left_out)
        assert ("(eos ignore)" in declared) == (policy.eos == "ignore")
        assert ("(tail drop)" in declared) == (own.tail == "drop")
        assert ("(boundary ignore)" in declared) == (policy.boundary == "ignore")


def inspected(folder, capsys):
    """The exit status, {row of the account: its cells}, what was said on standard error."""
    status = main(["inspect", str(folder), "--windows", "0"])
    said, told = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    return status, {row[0]: row[1:] for row in rows if len(row) == 3}, told


def test_inspect_prints_it_by_split(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    write_folder(tmp_path, TEXTS, PackingPolicy(6, eos="ignore"))
    status, rows, told = inspected(tmp_path, capsys)
    assert status == 0 and "add up" not in told
    assert rows["read"] == ["129", "19"]
    assert rows["no target: first of a document (boundary ignore)"] == ["7", "2"]
    assert rows["no target: EOS (eos ignore)"] == [
        "4",
        "2",
    ]  # that of no text is a first, two are dropped
    assert rows["dropped: last window, not full (tail drop)"] == ["7", ""]
    assert rows["targets, each once"] == ["111", "15"]
    assert rows["without an account"] == ["0", "0"]
    assert rows["padding (tail pad)"] == ["0", "0"] and rows["windows"] == ["20", "3"]


@pytest.mark.parametrize("words", POLICIES, ids=lambda words: "-".join(words.values()))
def test_targets_that_are_counted_wrongly_do_not_add_up(tmp_path, monkeypatch, words):
    monkeypatch.setattr(account_module, "row_targets", lambda *given: row_targets(*given) + 1)
    policy = PackingPolicy(6, **words)
    found = token_accounts(write_folder(tmp_path, TEXTS, policy), tmp_path)
    assert [one.num_missing for one in found] == [-one.num_windows for one in found]


def test_a_source_without_a_target_has_no_windows(tmp_path):
    texts = {TRAIN: [[[b"one document"]], [[b""]]], VALIDATION: [[[b"held out"]], [[b""]]]}
    policy = PackingPolicy(6, tail="pad")
    manifest = write_folder(tmp_path, texts, policy)
    train, validation = token_accounts(manifest, tmp_path)
    for one in (train, validation):
        assert counted(tmp_path, manifest, one.split, policy) == (one.num_targets, one.num_windows)
    assert (train.num_windows, train.num_padding, train.num_read) == (2, 0, 14)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_targets": 1},
        {"num_firsts": -1},
        {"num_ends": 2},  # which no policy of this folder declares
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_sums_that_do_not_agree_are_said_and_end_with_1(tmp_path, capsys, monkeypatch, wrong):
    monkeypatch.setenv("COLUMNS", "160")

    def changed(lengths, policy):
        found = account(lengths, policy)
        moved = {name: getattr(found, name) + more for name, more in wrong.items()}
        if "num_ends" in wrong:
            moved["num_targets"] = found.num_targets - wrong["num_ends"]
        return replace(found, **moved)

    monkeypatch.setattr(module, "account", changed)
    write_folder(tmp_path, TEXTS, PackingPolicy(6))
    status, rows, told = inspected(tmp_path, capsys)
    off = {"num_targets": -1, "num_firsts": 1, "num_ends": 2}[next(iter(wrong))]
    assert status == 1
    assert rows["without an account"] == [str(2 * off), str(off)]  # a source is a stream
    assert "error: the tokens of train do not add up: 129 read, " in told
    assert f"{2 * off:+} without an account" in told and "tokens of validation" in told
