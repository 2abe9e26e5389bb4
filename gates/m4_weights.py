"""M4. Open weights are read as they are, or refused by name: values, configuration, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gates import checkpoints, probes, toys
from gates.checkpoints import EMBEDDING, HEAD
from gates.memory import peak_bytes, require_peak_bytes, reset_peak_bytes
from harness import gate
from harness.compare import relative_error

NUM_TOKENS = 96
CASES = {
    "qwen2-tied": (checkpoints.QWEN2, torch.float32, 1),
    "qwen2-untied-sharded": (replace(checkpoints.QWEN2, tied_head=False), torch.float32, 3),
    "llama-untied": (checkpoints.LLAMA, torch.float32, 1),
    "llama-tied-sharded": (replace(checkpoints.LLAMA, tied_head=True), torch.float32, 4),
    "llama-bfloat16": (checkpoints.LLAMA, torch.bfloat16, 2),
}


@gate(
    claim="a loaded model holds every stored bit, tied where it should be, and computes with the "
    "rope_theta, epsilon and heads that config.json gives",
    roles=["load_pretrained"],
    not_claimed="that transformers computes the same: m4_parity",
    source="the published folders of Qwen2.5 and Llama; lyogavin/airllm PR#369 (theta lost), "
    "NVIDIA-NeMo/Automodel PR#2511 (a tie lost)",
)
@pytest.mark.parametrize("case", CASES)
def test_import(stack, case, rng, device, tmp_path, check):
    config, dtype, num_shards = CASES[case]
    tensors = checkpoints.random_tensors(config, rng, dtype)
    fields = checkpoints.published_fields(config)
    directory = checkpoints.write(tmp_path / "weights", fields, tensors, num_shards)
    model = stack.load_pretrained(directory, stack, None, device)
    got, want = checkpoints.parameters(model), checkpoints.with_head(config, tensors)
    check("parameters that differ", checkpoints.differing(got, want), equal=[],
          because="loading computes nothing")  # fmt: skip
    one_table = model.lm_head.weight is model.embed_tokens.weight
    check("one table", one_table, equal=config.tied_head, because="what config.json says")
    places = {parameter.device.type for parameter in model.parameters()}
    check("devices", sorted(places), equal=[device.type], because="the one that was asked for")
    ids_BT = probes.random_ids(rng, 2, NUM_TOKENS)
    oracle = checkpoints.reference_model(config, tensors)(ids_BT)
    with torch.no_grad():
        hidden_BTD = model.float()(ids_BT.to(device))
    check("relative error of the hidden states", relative_error(hidden_BTD, oracle), at_most=1e-5,
          because="the same weights in float32; theta 1e4 for 5e5 is 30 % off at these positions, "
          "epsilon 1e-6 for 1e-5 is 1 %")  # fmt: skip


@gate(
    claim="dtype and compute_dtype are those that were asked for, and a wider dtype keeps the "
    "stored values",
    roles=["load_pretrained"],
    not_claimed="narrowing without loss",
    source="master weights in float32 from a checkpoint in bfloat16",
)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes(stack, stored, rng, device, tmp_path, check):
    config = checkpoints.QWEN2
    tensors = checkpoints.random_tensors(config, rng, stored)
    fields = checkpoints.published_fields(config)
    directory = checkpoints.write(tmp_path / "weights", fields, tensors)
    narrow = toys.require_bfloat16(stack)
    model = stack.load_pretrained(directory, stack, torch.float32, device, narrow)
    want = {name: t.float() for name, t in checkpoints.with_head(config, tensors).items()}
    differing = checkpoints.differing(checkpoints.parameters(model), want)
    check("parameters that differ", differing, equal=[], because="float32 holds every bfloat16")
    with torch.no_grad():
        hidden_BTD = model(probes.random_ids(rng, 1, 8).to(device))
    check("dtype of the hidden states", str(hidden_BTD.dtype), equal="torch.bfloat16",
          because="the compute dtype that was asked for")  # fmt: skip


# What is changed in config.json, and the word that the refusal must hold.
FIELDS = {
    "rope-scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "rope-llama3": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
        "rope_parameters",
    ),
    "sliding-window": ({"use_sliding_window": True}, "use_sliding_window"),
    "sliding-layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "bias-of-mlp": ({"mlp_bias": True}, "mlp_bias"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "other-family": ({"model_type": "mistral"}, "model_type"),
    "no-width": ({"hidden_size": None}, "hidden_size"),
}


@gate(
    claim="a config.json that asks for what is not implemented is refused, naming the field",
    roles=["load_pretrained"],
    not_claimed="every field that some model has",
    source="a checkpoint that loads and computes something else is the silent failure",
)
@pytest.mark.parametrize("case", FIELDS)
def test_refused_configuration(stack, case, rng, tmp_path, check):
    changes, word = FIELDS[case]
    config = checkpoints.QWEN2
    tensors = checkpoints.random_tensors(config, rng, torch.float32)
    fields = checkpoints.published_fields(config) | changes
    directory = checkpoints.write(tmp_path / "weights", fields, tensors)
    ended = checkpoints.outcome(word, stack.load_pretrained, directory, stack)
    check("outcome", ended, equal=f"refused, naming {word}", because="it would be another model")


def missing(tensors, name):
    del tensors[name]


def second_table(tensors):
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


NORM, BIAS = "model.norm.weight", "model.layers.2.self_attn.k_proj.bias"
DOWN, EXTRA = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_norm.weight"
TENSORS = {
    "no-norm": (lambda tensors: missing(tensors, NORM), NORM),
    "no-bias": (lambda tensors: missing(tensors, BIAS), BIAS),
    "unexpected": (lambda tensors: tensors.update({EXTRA: torch.ones(6)}), EXTRA),
    "more-rows": (lambda tensors: tensors.update({EMBEDDING: torch.zeros(64, 32)}), EMBEDDING),
    "transposed": (lambda tensors: tensors.update({DOWN: torch.zeros(48, 32)}), DOWN),
    "integers": (lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}), NORM),
    "two-tables": (second_table, HEAD),
}


@gate(
    claim="tensors that are not exactly those of config.json are refused, naming one of them",
    roles=["load_pretrained"],
    not_claimed="wrong values of the right shape",
    source="strict=False leaves what is missing at its random start",
)
@pytest.mark.parametrize("case", TENSORS)
def test_refused_tensors(stack, case, rng, tmp_path, check):
    change, word = TENSORS[case]
    config = checkpoints.QWEN2
    tensors = checkpoints.random_tensors(config, rng, torch.float32)
    change(tensors)
    fields = checkpoints.published_fields(config)
    directory = checkpoints.write(tmp_path / "weights", fields, tensors, num_shards=2)
    ended = checkpoints.outcome(word, stack.load_pretrained, directory, stack)
    check("outcome", ended, equal=f"refused, naming {word}", because="it would be another model")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def header_overwritten(file: Path) -> None:
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])


FILES = {"cut-short": cut_short, "header": header_overwritten, "absent": Path.unlink}


@gate(
    claim="a damaged or absent shard is refused, naming the file",
    roles=["load_pretrained"],
    not_claimed="changed values inside a whole file: safetensors holds no checksum",
    source="an interrupted download",
)
@pytest.mark.parametrize("case", FILES)
def test_refused_files(stack, case, rng, tmp_path, check):
    config = checkpoints.QWEN2
    tensors = checkpoints.random_tensors(config, rng, torch.float32)
    fields = checkpoints.published_fields(config)
    directory = checkpoints.write(tmp_path / "weights", fields, tensors, num_shards=3)
    file = "model-00002-of-00003.safetensors"
    FILES[case](directory / file)
    ended = checkpoints.outcome(file, stack.load_pretrained, directory, stack)
    check("outcome", ended, equal=f"refused, naming {file}", because="weights are missing")


# The embedding is two thirds of the model: held twice, it would be 1.67 times its size.
LARGE = replace(
    checkpoints.LLAMA, vocabulary_size=32768, model_width=1024, feed_forward_width=4096,
    num_layers=1, num_query_heads=16, head_width=64, tied_head=True,
)  # fmt: skip


@gate(
    claim="loading takes at most 1.2 times the model's size, and a refusal next to nothing",
    roles=["load_pretrained"],
    not_claimed="the memory of an accelerator; this one loads onto the CPU",
    source="route B starts on machines that hold the model once",
)
@pytest.mark.parametrize("case", ["whole", "sharded", "refused"])
def test_memory(stack, case, tmp_path, check):
    require_peak_bytes()
    tensors = {name: torch.zeros(shape) for name, shape in checkpoints.shapes(LARGE).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if case == "refused":
        tensors[EXTRA] = torch.ones(6)
    directory = checkpoints.write(
        tmp_path / "weights", checkpoints.published_fields(LARGE), tensors, 1 + (case == "sharded")
    )
    del tensors
    before_bytes = reset_peak_bytes()
    ended = checkpoints.outcome(EXTRA, stack.load_pretrained, directory, stack)
    ratio = (peak_bytes() - before_bytes) / size
    if case == "refused":
        check("outcome", ended, equal=f"refused, naming {EXTRA}", because="it is not in the model")
        check("peak of a refusal over the model's size", ratio, at_most=0.1,
              because="headers are read, tensors are not")  # fmt: skip
        return
    check("outcome", ended, equal="accepted", because="nothing is wrong with it")
    check("peak over the model's size", ratio, within=(0.9, 1.2),
          because="the model once and a piece of one tensor; a file that stays mapped counts "
          "again, and less than the model says that nothing was read")  # fmt: skip
