"""Weights in and out: every bit comes back, what does not fit is refused, memory is bounded."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from reference.config import DecoderConfig
from reference.data.tokenizer import ByteTokenizer
from reference.hf import weights
from reference.hf.shards import INDEX, WHOLE, stored_tensors
from reference.hf.weights import load_pretrained, save_pretrained
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
CONFIG = DecoderConfig(
    vocabulary_size=61,
    model_width=32,
    feed_forward_width=48,
    num_layers=3,
    num_query_heads=8,
    num_kv_heads=2,
    head_width=6,
    max_positions=64,
    rope_theta=5e5,
    norm_epsilon=1e-5,
    qkv_bias=True,
)


def random_model(dtype=torch.float32, **changes):
    torch.manual_seed(5)
    model = STACK.build_model(replace(CONFIG, **changes), STACK).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def assert_same(got, want):
    assert got.config == want.config
    state = want.state_dict()
    assert got.state_dict().keys() == state.keys()
    for name, tensor in got.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])
    assert (got.lm_head.weight is got.embed_tokens.weight) == want.config.tied_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [2**30, 8000, 1])
@pytest.mark.parametrize(("bias", "tied"), [(True, True), (False, False)])
def test_every_bit_comes_back(tmp_path, dtype, max_shard_bytes, bias, tied):
    model = random_model(dtype, qkv_bias=bias, tied_head=tied)
    save_pretrained(model, tmp_path / "out", max_shard_bytes)
    assert (tmp_path / "out" / INDEX).exists() == (max_shard_bytes < 2**30)
    assert_same(load_pretrained(tmp_path / "out", STACK), model)


def test_pieces_of_a_few_rows_and_a_last_short_one_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("reference.hf.shards.PIECE_BYTES", 7 * 32 * 8)  # 61 rows of 32 by sevens
    model = random_model()
    save_pretrained(model, tmp_path / "out")
    assert_same(load_pretrained(tmp_path / "out", STACK), model)


def test_a_tie_is_stored_once_and_an_equal_head_beside_it_is_accepted(tmp_path):
    model = random_model()
    save_pretrained(model, tmp_path / "out")
    file = tmp_path / "out" / WHOLE
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    assert_same(load_pretrained(tmp_path / "out", STACK), model)
    head[60, 31] += 1
    save_file({**tensors, "lm_head.weight": head}, file)
    with pytest.raises(ValueError, match="stored and differ"):
        load_pretrained(tmp_path / "out", STACK)


def test_dtype_and_compute_dtype_are_the_callers(tmp_path):
    model = random_model(torch.bfloat16)
    save_pretrained(model, tmp_path / "out")
    loaded = load_pretrained(
        tmp_path / "out", STACK, dtype=torch.float32, compute_dtype=torch.bfloat16
    )
    assert loaded.config == replace(model.config, compute_dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.state_dict()[name].float())


def test_transformers_writes_what_we_read_and_reads_what_we_write(tmp_path):
    from transformers import AutoModelForCausalLM

    model = random_model()
    save_pretrained(model, tmp_path / "out", 8000)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.save_pretrained(tmp_path / "back", max_shard_size="8KB")
    assert_same(load_pretrained(tmp_path / "back", STACK), model)


def damaged(folder, change):
    """A sharded export of which `change(folder, index, tensors of the first shard)` is made."""
    save_pretrained(random_model(), folder, 8000)
    index = json.loads((folder / INDEX).read_text())
    first = folder / sorted(set(index["weight_map"].values()))[0]
    change(folder, index, first)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def rewrite(file, **changes):
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


EMBEDDING = "model.embed_tokens.weight"
DAMAGES = {
    "is not a whole safetensors file": lambda folder, index, first: first.write_bytes(
        b"\xff" * 8 + first.read_bytes()[8:]
    ),
    "is not a whole safetensors file: .*": lambda folder, index, first: first.write_bytes(
        first.read_bytes()[:-4]
    ),
    "does not hold": lambda folder, index, first: first.unlink(),
    r"only in the index \['model.embed_tokens.weight'\]": lambda folder, index, first: rewrite(
        first, **{EMBEDDING: None, "x": torch.zeros(1)}
    ),
    r"only in the file \['stray'\]": lambda folder, index, first: rewrite(
        first, stray=torch.zeros(1)
    ),
    r"embed_tokens.weight \[32, 61\] instead of \[61, 32\]": lambda folder, index, first: rewrite(
        first, **{EMBEDDING: torch.zeros(32, 61)}
    ),
    "must be F64, F32, F16 or BF16: model.embed_tokens.weight I8": (
        lambda folder, index, first: rewrite(
            first, **{EMBEDDING: torch.zeros(61, 32, dtype=torch.int8)}
        )
    ),
    "several dtypes": lambda folder, index, first: rewrite(
        first, **{EMBEDDING: torch.zeros(61, 32).bfloat16()}
    ),
    "must lie beside the index": lambda folder, index, first: index["weight_map"].update(
        {EMBEDDING: "../elsewhere.safetensors"}
    ),
    "holds both": lambda folder, index, first: (folder / WHOLE).write_bytes(first.read_bytes()),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files_are_refused_before_any_weight_is_read(tmp_path, monkeypatch, message):
    monkeypatch.setattr(weights, "pieces", None)  # reading a weight would be a TypeError
    folder = damaged(tmp_path / "out", DAMAGES[message])
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, STACK)


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.2.self_attn.q_proj.bias"])
def test_missing_and_unexpected_tensors_are_named(tmp_path, missing):
    save_pretrained(random_model(), tmp_path / "out")
    rewrite(tmp_path / "out" / WHOLE, **{missing: None, "model.norm.bias": torch.zeros(32)})
    with pytest.raises(ValueError, match=f"missing {missing}, unexpected model.norm.bias"):
        load_pretrained(tmp_path / "out", STACK)


def test_a_model_with_buffers_that_no_file_holds_is_refused(tmp_path):
    save_pretrained(random_model(), tmp_path / "out")

    def build_model(config, stack):
        model = STACK.build_model(config, stack)
        model.register_buffer("angles", torch.ones(6), persistent=False)
        return model

    stack = SimpleNamespace(**{**ROLES, "build_model": build_model})
    with pytest.raises(ValueError, match="buffers that no file holds: angles"):
        load_pretrained(tmp_path / "out", stack)


def test_the_configuration_is_judged_before_the_files_are_looked_at(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="model_type 'mamba'"):
        load_pretrained(tmp_path, STACK)
    with pytest.raises(ValueError, match="cannot read"):
        load_pretrained(tmp_path / "nowhere", STACK)


def test_a_folder_with_content_is_not_overwritten_and_a_failed_export_leaves_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        save_pretrained(random_model(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    for tokenizer_json, message in (
        (b"{", "cannot read the tokenizer's json"),
        (ByteTokenizer().json_bytes, "eos_token_id 300 is not in the tokenizer's vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            save_pretrained(random_model(), tmp_path / "new", 2**30, tokenizer_json, 300)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_is_not_what_its_configuration_says_is_not_exported(tmp_path):
    model = random_model()
    model.norm.weight.data = model.norm.weight.data.bfloat16()
    with pytest.raises(ValueError, match="one dtype"):
        save_pretrained(model, tmp_path / "out")
    model = random_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    with pytest.raises(ValueError, match="tied_head is True"):
        save_pretrained(model, tmp_path / "out")
    model = random_model()
    model.norm.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"missing none, unexpected norm\.bias"):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_pretrained(random_model(), tmp_path / "out", 0)


def test_files_are_as_readable_as_the_folder(tmp_path):
    save_pretrained(random_model(), tmp_path / "out", 8000)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


MEASURE = """
import sys, torch
from types import SimpleNamespace
from reference.stack import ROLES
import safetensors, safetensors.torch

def kilobytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

stack = SimpleNamespace(**ROLES)
before = kilobytes("VmRSS")
model = stack.load_pretrained(sys.argv[1], stack)
size = sum(parameter.nbytes for parameter in model.parameters())
print((kilobytes("VmHWM") - before) * 1024 / size, size)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="VmHWM is Linux's")
@pytest.mark.parametrize("max_shard_bytes", [2**30, 2**26])
def test_loading_needs_at_most_a_fifth_more_than_the_model(tmp_path, max_shard_bytes):
    # The embedding alone is two thirds: held twice, it would be 1.67 times the model.
    config = replace(CONFIG, vocabulary_size=32768, model_width=1024, feed_forward_width=4096)
    save_pretrained(STACK.build_model(config, STACK), tmp_path / "out", max_shard_bytes)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ratio, size = map(float, output.split())
    assert size > 180e6
    assert ratio < 1.2


def test_headers_tell_shapes_and_dtypes(tmp_path):
    save_pretrained(random_model(torch.bfloat16), tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")[EMBEDDING]
    assert (stored.shape, stored.dtype, stored.torch_dtype) == ((61, 32), "BF16", torch.bfloat16)
    with safe_open(tmp_path / "out" / WHOLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
