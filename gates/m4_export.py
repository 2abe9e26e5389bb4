"""M4. Weights are written as others read them: every bit, every field, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from gates import checkpoints, probes, twins
from gates.checkpoints import HEAD
from harness import gate
from harness.compare import relative_error

CASES = {
    "qwen2-tied": (checkpoints.QWEN2, torch.float32, 2**30),
    "qwen2-untied-sharded": (replace(checkpoints.QWEN2, tied_head=False), torch.float32, 8000),
    "llama-untied": (checkpoints.LLAMA, torch.float32, 2**30),
    "llama-tied-sharded": (replace(checkpoints.LLAMA, tied_head=True), torch.float32, 8000),
    "llama-bfloat16": (checkpoints.LLAMA, torch.bfloat16, 8000),
}


def exported(stack, case, rng, device, directory):
    """Saves a random model of the case; returns its configuration and its published tensors."""
    config, dtype, max_shard_bytes = CASES[case]
    tensors = checkpoints.random_tensors(config, rng, dtype)
    model = checkpoints.reference_model(config, tensors).to(device, dtype)
    stack.save_pretrained(model, directory, max_shard_bytes, None, 2)
    return config, tensors


def fields_that_differ(got, want):
    """Names of the fields of config.json that mean something else than `want`."""
    got = dict(got)
    rope = got.get("rope_parameters") or {}
    got.setdefault("rope_theta", rope.get("rope_theta"))
    want = {name: value for name, value in want.items() if name not in IN_ANY_SPELLING}
    return sorted(name for name, value in want.items() if got.get(name) != value)


IN_ANY_SPELLING = ("rope_parameters", "use_sliding_window", "sliding_window")


@gate(
    claim="the files hold every parameter once, bit for bit under its published name, in shards "
    "within the limit, and config.json holds every field that the computation needs",
    roles=["save_pretrained"],
    not_claimed="optimizer state, tokenizers",
    source="the published folders of Qwen2.5 and Llama; NVIDIA-NeMo/Automodel PR#2511",
)
@pytest.mark.parametrize("case", CASES)
def test_export(stack, case, rng, device, tmp_path, check):
    directory = tmp_path / "out"
    config, tensors = exported(stack, case, rng, device, directory)
    stored = checkpoints.read(directory)
    check("tensors that differ", checkpoints.differing(stored, tensors), equal=[],
          because="saving computes nothing; a tied head is not stored again")  # fmt: skip
    want = checkpoints.published_fields(config) | {"rope_theta": config.rope_theta}
    got = json.loads((directory / "config.json").read_text())
    check("fields that differ", fields_that_differ(got, want), equal=[],
          because="left out, they mean a default")  # fmt: skip
    files = sorted(directory.glob("*.safetensors"))
    largest = max(tensor.nbytes for tensor in tensors.values())
    limit = max(CASES[case][2], largest)
    for file in files:
        size = sum(tensor.nbytes for tensor in checkpoints.read_file(file).values())
        check("bytes of tensors in a file", size, within=(1, limit), because="the limit that was "
              "asked for, or one tensor that is larger", unit="B")  # fmt: skip
    if len(files) > 1:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        where = {name: file.name for file in files for name in checkpoints.read_file(file)}
        check("index that differs", sorted(index["weight_map"].items() ^ where.items()), equal=[],
              because="readers look there and nowhere else")  # fmt: skip


@gate(
    claim="a model that is saved and loaded again is the same: configuration, bits, tie, and "
    "hidden states",
    roles=["save_pretrained", "load_pretrained"],
    not_claimed="compute_dtype, which is no property of weights",
    source="export and import are inverse",
)
@pytest.mark.parametrize("case", CASES)
def test_round_trip(stack, case, rng, device, tmp_path, check):
    config, tensors = exported(stack, case, rng, device, tmp_path / "out")
    ended = checkpoints.outcome("nothing", stack.load_pretrained, tmp_path / "out", stack)
    check("loading", ended, equal="accepted", because="it was just saved")
    model = stack.load_pretrained(tmp_path / "out", stack, None, device)
    got, want = checkpoints.parameters(model), checkpoints.with_head(config, tensors)
    check("parameters that differ", checkpoints.differing(got, want), equal=[],
          because="nothing is rounded on the way")  # fmt: skip
    one_table = model.lm_head.weight is model.embed_tokens.weight
    check("one table", one_table, equal=config.tied_head, because="as it was")
    ids_BT = probes.random_ids(rng, 2, 96)
    with torch.no_grad():
        oracle = checkpoints.reference_model(config, tensors)(ids_BT)
        hidden_BTD = model.float()(ids_BT.to(device))
    check("relative error of the hidden states", relative_error(hidden_BTD, oracle), at_most=1e-5,
          because="rope_theta and epsilon came back too")  # fmt: skip


@gate(
    claim="AutoModelForCausalLM.from_pretrained loads the folder, with every weight and no other, "
    "and computes the same logits",
    roles=["save_pretrained"],
    not_claimed="the other way round: m4_pretrained",
    source="what an exported model is for",
)
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads(stack, case, rng, device, tmp_path, check):
    transformers = twins.require_transformers()
    config, tensors = exported(stack, case, rng, device, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto", local_files_only=True
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    amiss = sorted(f"{kind}: {name}" for kind in kinds for name in report[kind])
    check("names amiss", amiss, equal=[], because="what is missing starts at random")
    got = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    differing = checkpoints.differing(got, checkpoints.with_head(config, tensors))
    check("parameters that differ", differing, equal=[], because="dtype and bits are those saved")
    one_table = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    check("one table", one_table, equal=config.tied_head, because="training keeps it tied")
    check("end of a document", str(theirs.config.eos_token_id), equal="2", because="it was given")
    ids_BT = probes.random_ids(rng, 2, 96)
    ours = checkpoints.reference_model(config, tensors)
    with torch.no_grad():
        logits_BTV = ours(ids_BT) @ ours.lm_head.weight.T
        got_BTV = theirs.float()(ids_BT).logits
    check("relative error of the logits", relative_error(got_BTV, logits_BTV), at_most=1e-5,
          because="float32 on the CPU; theta 1e4 for 5e5 is 30 % off")  # fmt: skip


@gate(
    claim="a folder with content is left as it is, and a refused export leaves nothing behind",
    roles=["save_pretrained"],
    not_claimed="a machine that stops while it writes",
    source="an export over another one mixes their shards",
)
@pytest.mark.parametrize("case", ["taken", "untied", "two-dtypes", "another-tensor"])
def test_refused(stack, case, rng, tmp_path, check):
    config = checkpoints.QWEN2
    tensors = checkpoints.random_tensors(config, rng, torch.float32)
    model, directory = checkpoints.reference_model(config, tensors), tmp_path / "out"
    word = {"taken": "/out", "two-dtypes": "dtype", "another-tensor": "norm.bias"}.get(case, HEAD)
    if case == "taken":
        directory.mkdir()
        (directory / "model.safetensors").write_text("another model")
    elif case == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    elif case == "two-dtypes":
        model.norm.weight.data = model.norm.weight.data.bfloat16()
    else:
        model.norm.bias = torch.nn.Parameter(torch.ones(32))
    before = contents(tmp_path)
    ended = checkpoints.outcome(word, stack.save_pretrained, model, directory)
    check("outcome", ended, equal=f"refused, naming {word}", because="it is not what it says")
    check("files changed", sorted(contents(tmp_path) ^ before), equal=[],
          because="whole or not at all")  # fmt: skip


def contents(folder):
    """(path, bytes) of every file below the folder, and its folders."""
    return {
        (str(path.relative_to(folder)), path.read_bytes().hex() if path.is_file() else "")
        for path in folder.rglob("*")
    }
