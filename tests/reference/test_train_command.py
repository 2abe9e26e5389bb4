"""The training command: bad input is named before any work, and what it writes can be read."""

import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from reference import train_command as module
from reference.config import preset
from reference.data.json_tokenizer import JsonTokenizer
from reference.data.tokenizer import ByteTokenizer
from reference.data.training_text import MICROBATCHES_PER_WINDOW, language_text, python_text
from reference.stack import ROLES
from reference.train_command import main

SMALL = ["--corpus", "python-docs", "--corpus-bytes", "200000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--updates", "0"], "'0' is no whole number of at least 1"),
        (["--updates", "1.5"], "'1.5' is no whole number"),
        (["--corpus", "tales"], "invalid choice"),
        (["--device", "abacus"], "'abacus' cannot be used here"),
        (["--device", "meta"], "'meta' holds no numbers"),
        (["--preset", "chargpt-smoke"], "chargpt-smoke has 49 tokens and 32 positions"),
        (["--learning-rate", "-1"], "peak"),
        (["--init", "no-such-folder"], "no-such-folder holds no config.json"),
        (["--init", "package:tales"], "no weights are known in package 'tales'"),
        (["--init", "x", "--preset", "bytes-0.09m"], "leave --preset out"),
        (["--save-adapters", "x"], "--save-adapters needs --lora-rank"),
        (["--lora-rank", "2", "--save-adapters", "x", "--export", "x"], "two folders"),
        (["--lora-alpha", "4"], "--lora-alpha needs --lora-rank"),
        (["--lora-rank", "2", "--lora-alpha", "0"], "alpha must be a finite number above 0"),
        (["--resume"], "--resume and --checkpoint-every need --checkpoints"),
        (["--checkpoint-every", "5"], "need --checkpoints"),
        (["replay"], "the following arguments are required: DIR/anomaly-N"),
        (["replay", "no-such-folder"], "cannot read no-such-folder"),
        (["--row-tokens", "2000"], "rows have 2000 tokens, the model 1024 positions"),
        (["--row-tokens", "20"], "tokens; a row of its own holds 1 to 21"),
        ([*SMALL[:2], "--corpus-bytes", "9"], "no document fits into max_bytes 9"),
    ],
)
def test_bad_input_is_named_and_exits_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_content_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "_train", None)
    (tmp_path / "mine").write_text("do not lose me")
    with pytest.raises(SystemExit):
        main(["--export", str(tmp_path)])
    captured = capsys.readouterr()
    assert "exists already" in captured.err and captured.out == ""
    assert (tmp_path / "mine").read_text() == "do not lose me"


@pytest.mark.parametrize("corpus", [["--corpus", "language"], SMALL], ids=["language", "python"])
def test_the_command_prints_the_held_out_loss_before_and_after(corpus, capsys):
    assert main([*corpus, "--updates", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    before, after = captured.out.splitlines()
    assert before.startswith("before: held-out loss ") and after.startswith("2 updates, ")
    losses = [
        [float(x) for x in re.findall(r"([\d.]+) (?:nats per token|bits per byte,)", line)]
        for line in (before, after)
    ]
    assert losses[0][0] > losses[1][0] and losses[0][1] > losses[1][1]


def test_a_run_is_resumed_and_refused_where_it_is_another(tmp_path, capsys):
    kept = [*SMALL, "--checkpoints", str(tmp_path), "--checkpoint-every", "2"]
    assert main([*kept, "--updates", "3", "--resume"]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == f"nothing to resume in {tmp_path}; starting"
    assert first[1].startswith("before: ") and first[2].startswith("3 updates, ")
    assert main([*kept, "--updates", "3", "--resume"]) == 0
    second = capsys.readouterr().out.splitlines()
    assert second == [f"resuming from {tmp_path / 'step-00000003'}, exact", first[2]]
    for more, message in [
        ([], "step-00000003 is there already; --resume it or choose another directory"),
        (["--resume", "--updates", "4"], "--updates 3 as saved, 4 now; give"),
        (["--resume", "--updates", "3", "--seed", "1"], "--seed 0 as saved, 1 now; give"),
        (
            ["--resume", "--updates", "3", "--compute-dtype", "bfloat16"],
            "--compute-dtype float32 as saved, bfloat16 now; give",
        ),
        (
            ["--resume", "--updates", "3", "--corpus-bytes", "150000"],
            "--corpus-bytes 200000 as saved, 150000 now; give",
        ),
        (
            ["--resume", "--updates", "3", "--learning-rate", "0.1"],
            "--learning-rate 0.006 as saved, 0.1 now; give",
        ),
        (
            ["--resume", "--updates", "9", "--lora-rank", "2"],
            "--updates 3 as saved, 9 now; --learning-rate 0.006 as saved, 0.001 now; --lora-rank "
            "not given as saved, 2 now; give",
        ),
    ]:
        with pytest.raises(SystemExit):
            main([*kept, *more])
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""


def documents_of(rows):
    """The texts that were packed, from the inputs; padding and the EOS taken off."""
    stream = rows.tokens[:, :-1][rows.documents[:, :-1] >= 0].tolist()
    ends = [-1, *(place for place, token in enumerate(stream) if token == ByteTokenizer.eos)]
    return [bytes(stream[start + 1 : stop]) for start, stop in pairwise(ends)]


def test_bits_per_byte_come_from_the_bytes_of_the_source():
    text = python_text(ByteTokenizer(), 128, 200_000)
    assert text.held_out_bytes == sum(map(len, documents_of(text.held_out))) > 10_000


def test_no_document_is_in_both_parts():
    text = python_text(ByteTokenizer(), 64, 300_000)
    training, held_out = documents_of(text.training), documents_of(text.held_out)
    assert len(training) > 30 and len(held_out) > 1
    assert not set(training) & set(held_out)


def test_windows_can_be_gone_through_again():
    windows = language_text(ByteTokenizer(), None, 0).windows(seed=1, num_updates=3)
    first, second = list(windows), list(windows)
    assert len(windows) == len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.microbatches[0].input_ids, other.microbatches[0].input_ids)


def test_the_command_trains_in_bfloat16_with_float32_parameters(monkeypatch):
    kept = []
    real = module.train

    def keep(*arguments, **options):
        kept.append(real(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(module, "train", keep)
    assert main(["--updates", "2", "--compute-dtype", "bfloat16"]) == 0
    (result,) = kept
    assert result.model.config.compute_dtype == torch.bfloat16
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
    assert {s.first_moment.dtype for s in result.optimizer_state.values()} == {torch.float32}


def test_layers_that_are_computed_again_train_to_the_same_digits(capsys, monkeypatch):
    calls, swiglu = [], ROLES["swiglu"]

    def counted(gate, up):
        calls.append(gate.shape)
        return swiglu(gate, up)

    monkeypatch.setitem(ROLES, "swiglu", counted)
    told, num_calls = [], []
    for more in ([], ["--checkpoint-activations"]):
        calls.clear()
        assert main([*SMALL, "--updates", "3", "--lora-rank", "2", *more]) == 0
        told.append(capsys.readouterr().out)
        num_calls.append(len(calls))
    assert told[0] == told[1]
    num_microbatches = 3 * MICROBATCHES_PER_WINDOW
    assert num_calls[1] - num_calls[0] == num_microbatches * preset("bytes-0.09m").num_layers


def held_out(line):
    return re.search(r"held-out loss ([\d.]+)", line).group(1)


def test_an_exported_model_starts_where_it_ended(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    assert main(["--updates", "3", "--export", str(folder)]) == 0
    ended = capsys.readouterr().out.splitlines()[1]
    assert main(["--init", str(folder), "--updates", "1"]) == 0
    started = capsys.readouterr().out.splitlines()[0]
    assert held_out(started) == held_out(ended)
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert twin.config.eos_token_id == ByteTokenizer.eos
    assert torch.equal(JsonTokenizer(folder).encode(b"caf\xc3\xa9 <|"), ByteTokenizer().encode(
        b"caf\xc3\xa9 <|"))  # fmt: skip


def test_adapters_are_saved_alone_and_exported_merged(tmp_path, capsys):
    pytest.importorskip("peft")
    base, adapters, merged = (str(tmp_path / name) for name in ("base", "adapters", "merged"))
    assert main(["--updates", "1", "--export", base]) == 0
    arguments = ["--init", base, "--updates", "3", "--lora-rank", "4"]
    assert main([*arguments, "--save-adapters", adapters, "--export", merged]) == 0
    before, after = [line for line in capsys.readouterr().out.splitlines() if "loss" in line][2:]
    assert float(held_out(before)) > float(held_out(after))
    stored = load_file(f"{adapters}/adapter_model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in stored)
    tables = [
        load_file(f"{f}/model.safetensors")["model.embed_tokens.weight"] for f in (base, merged)
    ]
    assert torch.equal(*tables)  # nothing but the adapted matrices changed
    assert main(["--init", merged, "--updates", "1"]) == 0
    assert held_out(capsys.readouterr().out) == held_out(after)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["--updates", "1", "--export", str(folder)]) == 0
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"eos_token_id": 256', '"eos_token_id": 3'))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(SystemExit):
        main(["--init", str(folder)])
    assert "do not belong together" in capsys.readouterr().err
