"""The command says what it made, and refuses before the work what would be refused after it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prepared import lines, prepared, text_folder, texts

from reference.data.acceptance import EXACT, PROBES, REFUSED
from reference.data.bpe import train_bpe
from reference.data.folder_text import open_folder
from reference.data.manifest import read_manifest
from reference.data.policy import CHOICES, PackingPolicy
from reference.data.prepare_command import DEFAULT_WINDOW_TOKENS, main
from reference.data.remarks import warnings
from reference.data.tokenizing import parse_tokenizer
from reference.data.work import leftovers
from reference.stack import ROLES


@pytest.fixture
def folder(tmp_path):
    return text_folder(tmp_path / "source")


def test_the_command_prepares_inspects_and_draws(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = str(tmp_path / "out")
    arguments = ["prepare", f"{folder}?weight=3", "python-docs?weight=1", "--out", out,
                 "--window-tokens", "512", "--tail", "pad", "--near-duplicates", "all"]  # fmt: skip
    assert main(arguments) == 0
    assert "0 documents shared" in capsys.readouterr().out
    drawing = tmp_path / "drawing.png"
    assert main(["inspect", out, "--drawing", str(drawing)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "what is written",
        "tokens per byte",
        "part of an epoch",
        "<EOS>",
        "its token 1",
        "count from 1 here; row in the tables of the shards from 0",
        "account of the tokens",
    ):
        assert words in shown
    assert drawing.read_bytes().startswith(b"\x89PNG") and drawing.stat().st_size > 10_000
    manifest = read_manifest(out)
    assert manifest.policy["tail"] == "pad" and manifest.policy["window_tokens"] == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--validation-fraction", "0"], "must be between 0 and 1"),
        (["--validation-fraction", "nan"], "must be between 0 and 1"),
        (["--validation-fraction", "1.5"], "must be between 0 and 1"),
        (["--near-duplicate-threshold", "1.5"], "must be above 0 and at most 1"),
        (["--tokenizer", "bpe:100"], "vocabulary_size is 100"),
        (["--workers", "0"], "no whole number"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", str(folder), "--out", str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing was begun"


def test_tokenizers_that_are_none_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for text, message in (
        ("bpe", "give the size"),
        ("bpe:x", "give the size"),
        ("x?eos=last", "no whole number"),
        ("x?foo=1", "no option 'foo'; there is eos"),
        (str(tmp_path), "cannot read the tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_tokenizer(text)


@pytest.mark.parametrize("name", ["[/x]", "[bold]"])
def test_names_with_brackets_are_printed_as_they_are(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "rows.jsonl").write_bytes(lines({"text": t, "topic": name} for t in texts(40)))
    source = f"{tmp_path / 'rows.jsonl'}?slice=topic"
    arguments = ["prepare", source, "--out", str(tmp_path / "out"), "--window-tokens", "64",
                 "--validation-fraction", "0.3"]  # fmt: skip
    assert main(arguments) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert name in capsys.readouterr().out


def test_the_manifest_has_what_the_tokenizer_was_accepted_for(folder, tmp_path):
    for kind, invalid in (("bytes", EXACT), ("bpe:300", REFUSED)):
        manifest = prepared(tmp_path / kind, folder, tokenizer=kind)
        (step,) = [step for step in manifest.steps if step.name == "tokenizer"]
        want = {**dict.fromkeys(PROBES, EXACT), "invalid bytes": invalid}
        assert step.results["probes"] == want


def test_a_tokenizer_that_changes_text_is_told(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # workers of xdist have 80
    from tokenizers import Tokenizer, normalizers

    lossy = Tokenizer.from_str(train_bpe([b"abc " * 9], 257).decode())
    lossy.normalizer = normalizers.Lowercase()
    (tmp_path / "lossy.json").write_text(lossy.to_str())
    (folder / "000.txt").write_text("Upper case")
    arguments = ["prepare", str(folder), "--out", str(tmp_path / "out"), "--window-tokens", "64",
                 "--tokenizer", f"{tmp_path / 'lossy.json'}?eos=0",
                 "--validation-fraction", "0.3"]  # fmt: skip
    assert main(arguments) == 0
    said, warned = capsys.readouterr()
    split = "train" if "1 in train" in warned else "validation"
    assert f"does not give back 1 documents as they were (1 in {split} source txt)" in warned
    assert "the tokenizer changes text on trial: special-token text" in said
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "changed by the tokenizer" in capsys.readouterr().out
    stack = SimpleNamespace(**ROLES)
    assert (
        "does not give back 1 documents"
        in warnings(open_folder(tmp_path / "out", stack).manifest)[0]
    )


def test_leftovers_of_a_folder_with_odd_letters_are_found(tmp_path):
    (tmp_path / ".data[1].prepare-0123456789ab").mkdir()
    (tmp_path / ".data1.prepare-0123456789ab").mkdir()
    (found,) = leftovers(tmp_path / "data[1]", "f" * 64)
    assert found.name == ".data[1].prepare-0123456789ab"


def test_what_a_finished_preparation_left_is_told(tmp_path):
    own = tmp_path / ".data.prepare-ffffffffffff"  # killed between publishing and removing
    own.mkdir()
    assert leftovers(tmp_path / "data", "f" * 64) == []
    (tmp_path / "data").mkdir()
    assert leftovers(tmp_path / "data", "f" * 64) == [own]


def test_a_share_of_tokens_that_nobody_asked_for_is_told(tmp_path, capsys):
    rows = [{"text": text} for text in texts(400)]
    held_out = prepared_with(tmp_path / "even", rows, fraction=0.1)
    assert not [one for one in warnings(held_out) if "held" in one]
    rows += [{"text": " ".join(texts(300, seed=number))} for number in range(1, 9)]
    found = [prepared_with(tmp_path / str(seed), rows, fraction=0.02, seed=seed) for seed in (0, 5)]
    for manifest in found:
        num_tokens = sum(shard.num_tokens for shard in manifest.shards)
        share = sum(shard.num_tokens for shard in manifest.shards_of("validation")) / num_tokens
        said = [one for one in warnings(manifest) if "asked for" in one]
        assert len(said) == (not 0.01 <= share <= 0.04)
        assert all(f"{share:.2%} of the tokens" in one and "were 2.00%" in one for one in said)
    assert any("asked for" in one for manifest in found for one in warnings(manifest))


def prepared_with(directory, rows, fraction, seed=0):
    file = directory.with_suffix(".jsonl")
    file.write_bytes(lines(rows))
    return prepared(directory, file, validation_fraction=fraction, seed=seed)


def test_few_held_out_documents_are_told(tmp_path, capsys):
    text_folder(tmp_path / "source", num=12)
    arguments = ["--window-tokens", "64", "--validation-fraction", "0.3"]
    assert (
        main(["prepare", str(tmp_path / "source"), "--out", str(tmp_path / "out"), *arguments]) == 0
    )
    num = sum(s.num_documents for s in read_manifest(tmp_path / "out").shards_of("validation"))
    assert num < 10 and f"on {num} documents only, fewer than 10" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert f"warning: the held-out loss is on {num} documents" in capsys.readouterr().out


def test_the_tokenizer_of_a_prepared_folder_ends_documents_as_there(folder, tmp_path):
    first = prepared(tmp_path / "first", folder, tokenizer="bpe:300")
    for path in (tmp_path / "first", tmp_path / "first" / "tokenizer.json"):
        assert parse_tokenizer(str(path)).given.eos == first.tokenizer.eos
    again = prepared(tmp_path / "again", folder, tokenizer=str(tmp_path / "first"))
    assert again.tokenizer.eos == first.tokenizer.eos
    file = tmp_path / "first" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"1.0", b"1.1", 1))
    with pytest.raises(ValueError, match="was changed"):
        parse_tokenizer(str(file))


@pytest.mark.parametrize("command", ["", ".trace", ".acceptance"])
def test_a_reader_that_goes_away_ends_a_command_quietly(command, folder, tmp_path):
    prepared(tmp_path / "out", folder)
    arguments = {
        "": ["prepare", str(folder), "--out", str(tmp_path / "again"), "--window-tokens", "32",
             "--validation-fraction", "0.3"],
        ".trace": [str(tmp_path / "out"), "--update", "1"],
        ".acceptance": [str(tmp_path / "out")],
    }[command]  # fmt: skip
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run(
        [sys.executable, "-m", f"reference.data{command}", *arguments],
        stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(writer)
    assert found.returncode == 1
    assert b"Traceback" not in found.stderr and b"Errno" not in found.stderr, found.stderr


def test_the_readme_has_every_packing_option_with_its_values_and_default():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, words in CHOICES.items():
        values = ", ".join(f"`{word}`" for word in words)
        default = getattr(PackingPolicy(1), name)
        assert f"| `--{name}` | {values} | `{default}` | " in readme
    assert f"| `--window-tokens` | 1 or more | {DEFAULT_WINDOW_TOKENS} | " in readme


def test_the_help_says_what_a_packing_policy_does(capsys):
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in ("within its document", "wrap, which fills it", "restart at 0", "(within)"):
        assert words in said
