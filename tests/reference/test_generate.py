"""Generation and its command: limits are stated, and bad input is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import preset
from reference.data.tokenizer import ByteTokenizer
from reference.generate import GenerationSettings, generate, next_token
from reference.generate_command import main
from reference.hf.weights import save_pretrained
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
CONFIG = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=1)
PROMPT = torch.tensor([72, 105])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return STACK.build_model(CONFIG, STACK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_k": 0}, "top_k must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GenerationSettings(**settings)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "settings", "message"),
    [
        (torch.tensor([], dtype=torch.int64), 1, {}, "at least one token"),
        (PROMPT[None], 1, {}, r"got torch.int64 \[1, 2\]"),
        (PROMPT.float(), 1, {}, "got torch.float32"),
        (torch.tensor([257]), 1, {}, r"must lie in \[0, 257\), got 257 to 257"),
        (PROMPT, 0, {}, "num_tokens must be at least 1, got 0"),
        (PROMPT, 1, {"top_k": 258}, "top_k 258 is more than the vocabulary's 257"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, prompt, num_tokens, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, num_tokens, GenerationSettings(**settings))


def test_logits_that_are_not_finite_are_an_error_and_not_a_token(model):
    broken = STACK.build_model(CONFIG, STACK)
    torch.nn.init.constant_(broken.norm.weight, float("nan"))
    with pytest.raises(ValueError, match="logits after 2 tokens are not finite"):
        generate(broken, PROMPT, 1, GenerationSettings())
    assert broken.training


def test_a_tiny_temperature_is_nearly_greedy_and_not_nan():
    logits = torch.tensor([0.0, 5.0, 4.0], dtype=torch.float64)
    settings = GenerationSettings(temperature=1e-300)
    generator = torch.Generator().manual_seed(0)
    assert {next_token(logits, settings, generator) for _ in range(20)} == {1}


def test_the_prompt_is_not_part_of_the_result_and_stays_as_it_was(model):
    tokens = generate(model, PROMPT, 5, GenerationSettings())
    assert tokens.shape == (5,) and tokens.dtype == torch.int64
    assert PROMPT.tolist() == [72, 105]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "model"
    tokenizer = ByteTokenizer()
    save_pretrained(model, folder, tokenizer_json=tokenizer.json_bytes, eos_token_id=tokenizer.eos)
    return folder


def test_the_command_prints_the_prompt_and_what_follows(folder, model, capsys):
    arguments = ["--init", str(folder), "--prompt", "Hi", "--tokens", "4"]
    assert main([*arguments, "--temperature", "1", "--top-k", "20", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    settings = GenerationSettings(1.0, 20, 3, ByteTokenizer.eos)
    tokens = generate(model, PROMPT, 4, settings)
    text = bytes([*b"Hi", *tokens[tokens != ByteTokenizer.eos].tolist()])
    assert captured.out == text.decode("utf-8", errors="replace") + "\n"
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "at least one token"),
        (["--prompt", "caf\udce9"], "byte 3 (0xe9) is not UTF-8"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be finite"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "300"], "top_k 300 is more than"),
        (["--prompt", "a", "--top-k", "3"], "temperature 0 draws nothing"),
        (["--prompt", "a", "--adapters", "nowhere"], "cannot read nowhere"),
    ],
)
def test_bad_input_is_named_and_exits_2(folder, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["--init", str(folder), *arguments])
    assert exit_status.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_a_character_that_no_token_can_hold_is_refused(tmp_path, model, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    letters.add_special_tokens(["<end>"])
    folder = tmp_path / "letters"
    tokenizer_json = letters.to_str().encode()
    save_pretrained(model, folder, tokenizer_json=tokenizer_json, eos_token_id=2)
    with pytest.raises(SystemExit):
        main(["--init", str(folder), "--prompt", "abé"])
    assert "no token can hold 'é' (U+00E9)" in capsys.readouterr().err
