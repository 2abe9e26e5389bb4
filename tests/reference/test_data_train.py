"""Training from a prepared folder: what it refuses, that it resumes, and what it counts."""

import hashlib
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from data_folders import write_folder

from reference.config import preset
from reference.data import trace
from reference.data.bpe import train_characters
from reference.data.folder_text import (
    declared_weights,
    open_folder,
    require_tokenizer,
    with_vocabulary,
)
from reference.data.manifest import MANIFEST, SourceRecord
from reference.data.open_tokenizer import open_tokenizer
from reference.data.policy import PackingPolicy
from reference.data.training_text import language_documents
from reference.stack import ROLES
from reference.train_command import main

STACK = SimpleNamespace(**ROLES)


def documents(split, num_documents):
    return [one.text for one in language_documents("easy", split, num_documents, 0)]


def sources():
    train, held_out = documents("train", 90), documents("held_out", 9)
    return {"train": [[train[:50], train[50:70]], [train[70:]]], "validation": [[held_out]]}


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "data", sources(), PackingPolicy(48))
    return tmp_path / "data"


def run(folder, *arguments):
    return main(["--data", str(folder), "--updates", "4", *map(str, arguments)])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_status:
        main(list(map(str, arguments)))
    assert exit_status.value.code == 2
    return capsys.readouterr().err


def test_a_run_says_what_it_learnt_and_how_long_it_waited(folder, capsys):
    assert run(folder) == 0
    before, after, waited = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"([\d.]+) bits per byte", line)[1]) for line in (before, after)]
    assert losses[0] > losses[1] > 0
    assert re.fullmatch(r"waited for data: [\d.]+ s of [\d.]+ s, [\d.]+%", waited)


def test_a_run_that_had_ended_waited_for_nothing(folder, tmp_path, capsys):
    kept = ["--checkpoints", tmp_path / "kept"]
    assert run(folder, *kept) == run(folder, *kept, "--resume") == 0
    assert capsys.readouterr().out.count("waited for data") == 1


def test_bits_per_byte_are_of_the_bytes_of_the_documents(folder):
    text = open_folder(folder, STACK)
    assert text.held_out_bytes == sum(map(len, sources()["validation"][0][0]))
    num_targets = sum(window.num_targets for window in text.held_out_windows())
    assert num_targets == text.held_out_bytes  # all but each first byte, and each end


def test_nothing_held_out_is_dropped_whatever_the_tail(tmp_path):
    for tail in ("drop", "wrap"):
        write_folder(tmp_path / tail, sources(), PackingPolicy(48, tail=tail))
        text = open_folder(tmp_path / tail, STACK)
        assert text.training.policy.tail == tail and text.held_out.policy.tail == "pad"
        assert sum(window.num_targets for window in text.held_out_windows()) == text.held_out_bytes


def test_a_run_is_resumed_exactly_and_refused_on_other_data(folder, tmp_path, capsys):
    def final(*arguments):
        assert main(["--data", str(folder), *map(str, arguments)]) == 0
        return capsys.readouterr().out.splitlines()[-2]

    whole = final("--updates", 6)
    kept = ["--checkpoints", tmp_path / "run", "--checkpoint-every", 2]
    assert final("--updates", 6, *kept) == whole
    shutil.rmtree(tmp_path / "run" / "step-00000006")  # as if it had been stopped before
    assert final("--updates", 6, *kept, "--resume") == whole
    write_folder(tmp_path / "other", sources(), PackingPolicy(48, eos="ignore"))
    message = refused(capsys, "--data", tmp_path / "other", "--updates", 6, *kept, "--resume")
    assert "manifest" in message


def change_shard(folder):
    shard = folder / "train" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(bytes(content))


def cut_shard(folder):
    shard = folder / "train" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])


def lose_shard(folder):
    next((folder / "validation").glob("*.bin")).unlink()


def other_tokenizer(folder):
    (folder / "tokenizer.json").write_bytes(b'{"type": "bytes", "eos": 255}')


def other_version(folder):
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "version": 2}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_shard, "shard-00000.bin"),
        (cut_shard, "shard-00000.bin has"),
        (lose_shard, "does not hold validation/shard-"),
        (other_tokenizer, "tokenizer.json"),
        (other_version, "version 2; this program reads"),
    ],
)
def test_a_folder_that_was_changed_is_refused_before_a_model_is_made(
    folder, damage, message, capsys, monkeypatch
):
    monkeypatch.setattr("reference.train_command.initial_model", None)
    damage(folder)
    assert message in refused(capsys, "--data", folder)


@pytest.mark.parametrize(
    ("contamination", "message"),
    [
        ({"status": "unfinished"}, "its contamination check is 'unfinished'"),
        ({}, "its contamination check is None"),
        ({"status": "complete", "num_shared_documents": 3}, "3 validation documents are in"),
    ],
)
def test_text_that_may_be_contaminated_is_refused(tmp_path, contamination, message, capsys):
    write_folder(tmp_path, sources(), PackingPolicy(48), contamination=contamination)
    assert message in refused(capsys, "--data", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "language"], "--data brings its own text"),
        (["--row-tokens", "9"], "--data brings its own text"),
        (
            ["--preset", "chargpt-smoke"],
            "the model 32 positions; choose another --window-tokens of prepare",
        ),
    ],
)
def test_options_that_do_not_go_with_a_folder_are_refused(folder, arguments, message, capsys):
    assert message in refused(capsys, "--data", folder, *arguments)


def test_what_the_manifest_warns_of_is_said_before_training(tmp_path, capsys):
    found = {
        "status": "complete", "num_shared_documents": 0, "num_overlapping_documents": 83,
        "num_validation_documents": 158, "threshold": 0.5, "ngram_words": 13,
        "num_decoded_differently": 7,
        "decoded_differently": [
            {"split": "train", "source": 1, "slice": "all", "num_documents": 7}
        ],
    }  # fmt: skip
    write_folder(tmp_path, sources(), PackingPolicy(48), contamination=found)
    assert run(tmp_path) == 0
    overlap, changed, few = [
        s for s in capsys.readouterr().err.splitlines() if s.startswith("warning")
    ]
    assert "held-out loss is on text of which 83 of 158 documents have 50% or more of" in overlap
    assert "does not give back 7 documents as they were (7 in train source 1 all)" in changed
    assert "documents only, fewer than 10" in few


def test_no_folder_is_refused(tmp_path, capsys):
    assert "is no prepared data" in refused(capsys, "--data", tmp_path)


def test_a_split_that_is_too_small_is_refused(tmp_path, capsys):
    write_folder(tmp_path, sources(), PackingPolicy(9000))
    assert "no window of 9000 tokens in train" in refused(capsys, "--data", tmp_path)


def test_another_tokenizer_than_the_models_is_refused(folder):
    text = open_folder(folder, STACK)
    require_tokenizer(text, text.tokenizer)
    with pytest.raises(ValueError, match="the model's tokenizer is 000000000000, the data"):
        require_tokenizer(text, SimpleNamespace(sha256="0" * 64))


def record(name, weight):
    return SourceRecord(name, "files", "here", "0" * 64, None, weight, 1, 1, 1, {})


def test_declared_weights_mix_the_sources(tmp_path):
    declared = [record("a", 0.9), record("b", 0.1)]
    manifest = write_folder(tmp_path / "a", sources(), PackingPolicy(48), sources=declared)
    text = open_folder(tmp_path / "a", STACK)
    assert declared_weights(manifest, text.training) == [0.9, 0.1]
    loader = text.windows(0, 40)
    seen = [loader.sampled(place) for place in range(640)]
    assert {one.share for one in seen if one.source == 0} == {0.9}
    firsts = text.training.first_windows
    targets = [0, 0]
    for one in seen:
        targets[one.source] += int(
            text.training.targets[one.source][one.window - firsts[one.source]]
        )
    assert abs(targets[0] / sum(targets) - 0.9) <= 2 * 48 / sum(targets)


def test_a_declared_weight_of_a_source_without_a_window_is_refused(tmp_path, capsys):
    texts = sources()
    texts["train"].append([[b"short"]])
    three = [record("a", 0.5), record("b", 0.3), record("c", 0.2)]
    write_folder(tmp_path, texts, PackingPolicy(48), sources=three)
    message = refused(capsys, "--data", tmp_path)
    assert "source c declares weight 0.2, and has no window of 48 tokens" in message


def test_weights_of_some_sources_only_are_refused(tmp_path, capsys):
    some = [record("a", 0.9), record("b", None)]
    write_folder(tmp_path, sources(), PackingPolicy(48), sources=some)
    assert "every source declares a weight or none does" in refused(capsys, "--data", tmp_path)


@pytest.mark.parametrize("size", [30, 400])
def test_a_model_has_as_many_tokens_as_the_tokenizer(size):
    tokenizer = SimpleNamespace(vocabulary_size=size)
    for name in ("bytes-0.09m", "chargpt-smoke", "qwen2.5-0.5b"):
        assert with_vocabulary(preset(name), tokenizer).vocabulary_size == size


def test_characters_are_trained_on(tmp_path, capsys):
    texts = sources()
    whole = [
        text for parts in (*texts["train"], *texts["validation"]) for part in parts for text in part
    ]
    (tmp_path / "characters.json").write_bytes(train_characters(whole))
    tokenizer = open_tokenizer(tmp_path / "characters.json", 0)
    write_folder(tmp_path / "data", texts, PackingPolicy(48), tokenizer)
    assert run(tmp_path / "data") == 0
    assert "4 updates" in capsys.readouterr().out


def test_an_update_is_traced_to_its_documents(folder, capsys):
    assert trace.main([str(folder), "--update", "2", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("row ")]
    assert len(rows) == 16 and rows[0].startswith("row 17: window ")
    assert re.search(r"targets, because source \d has [\d.]+% of them \(of its size\)", rows[0])
    text = open_folder(folder, STACK)
    window = next(itertools.islice(text.windows(3, 2), 1, None))
    tokens = torch.cat([microbatch.input_ids for microbatch in window.microbatches])
    texts = {hashlib.sha256(one).hexdigest()[:12]: one for one in documents("train", 90)}
    traced, row = "", -1
    for line in [*lines, "row end"]:
        if line.startswith("row "):
            if row >= 0:
                assert list(traced) == [t if t < 256 else 0 for t in tokens[row].tolist()]
            traced, row = b"", row + 1
        else:
            begin, end = map(int, re.search(r"tokens (\d+) to (\d+) of", line).groups())
            name = re.search(r"sha256 (\w+)", line)[1]
            traced = (traced + (texts[name] + b"\0")[begin - 1 : end])[: tokens.shape[1]]
