"""Open weights read wrongly: other values, a lost configuration, what does not fit let in."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gates import checkpoints
from gates.checkpoints import EMBEDDING, HEAD
from harness import benign, fault

IMPORT = "m4_weights::test_import"
FIELDS = "m4_weights::test_refused_configuration"
TENSORS = "m4_weights::test_refused_tensors"
FILES = "m4_weights::test_refused_files"
DTYPES = "m4_weights::test_dtypes"
SHARDED = [f"{IMPORT}[{case}]" for case in ("qwen2-untied-sharded", "llama-tied-sharded")]


def changed(reference, change: Callable[[nn.Module], Any]):
    """load_pretrained, and then something done to the model."""

    def load_pretrained(directory, stack, *options):
        model = reference.load_pretrained(directory, stack, *options)
        with torch.no_grad():
            change(model)
        return model

    return load_pretrained


def from_a_copy(reference, change: Callable[[Path, dict[str, Any], dict[str, Any]], Any]):
    """load_pretrained of a copy whose fields and tensors were changed before."""

    def load_pretrained(directory, stack, *options):
        with tempfile.TemporaryDirectory() as folder:
            fields = json.loads((directory / "config.json").read_text())
            tensors = checkpoints.read(directory)
            change(directory, fields, tensors)
            copy = checkpoints.write(Path(folder) / "copy", fields, tensors)
            return reference.load_pretrained(copy, stack, *options)

    return load_pretrained


@fault(role="load_pretrained", caught_by=IMPORT, seen_in="lyogavin/airllm PR#369")
def loads_with_the_default_theta(reference):
    """Computes with rope_theta 10000, whatever config.json says."""

    def change(model):
        for layer in model.layers:
            layer.self_attn.theta = 1e4

    return changed(reference, change)


@fault(role="load_pretrained", caught_by=f"{IMPORT}[llama-untied]", seen_in="own")
def reads_theta_in_the_older_place_only(reference):
    """Looks for the field rope_theta and passes over rope_parameters, where newer files have it."""
    return from_a_copy(reference, lambda _, fields, __: fields.pop("rope_parameters", None))


@fault(role="load_pretrained", caught_by=IMPORT, seen_in="own")
def loads_with_the_default_epsilon(reference):
    """Computes with rms_norm_eps 1e-6 for 1e-5."""

    def change(model):
        for module in model.modules():
            if hasattr(module, "epsilon"):
                module.epsilon = 1e-6

    return changed(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{IMPORT}[qwen2-tied]", f"{IMPORT}[llama-tied-sharded]"],
    seen_in="NVIDIA-NeMo/Automodel PR#2511",
)
def unties_the_head(reference):
    """The head is a copy of the embedding: equal now, trained apart later."""

    def change(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())

    return changed(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{IMPORT}[qwen2-untied-sharded]", f"{IMPORT}[llama-untied]"],
    seen_in="own",
)
def ties_every_head(reference):
    """The stored head of an untied model is passed over for the embedding."""

    def change(model):
        model.lm_head.weight = model.embed_tokens.weight

    return changed(reference, change)


@fault(role="load_pretrained", caught_by=IMPORT, seen_in="own")
def swaps_gate_and_up(reference):
    """Two tensors of one shape change places."""

    def change(model):
        for layer in model.layers:
            mlp = layer.mlp
            mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight

    return changed(reference, change)


@fault(role="load_pretrained", caught_by=IMPORT, seen_in="ggml-org/llama.cpp's GGUF layout of q, k")
def permutes_the_rows_of_q_and_k(reference):
    """Takes the half-split rows of a head for interleaved ones and sorts them."""

    def change(model):
        for layer in model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                heads = projection.weight.unflatten(0, (-1, 2, layer.self_attn.head_width // 2))
                projection.weight.copy_(heads.transpose(1, 2).flatten(0, 2).clone())

    return changed(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{IMPORT}[qwen2-tied]", f"{IMPORT}[qwen2-untied-sharded]"],
    seen_in="own",
)
def drops_the_biases(reference):
    """The biases of q, k and v stay at zero."""

    def change(model):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()

    return changed(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{IMPORT}[qwen2-tied]", *SHARDED, f"{IMPORT}[llama-untied]"],
    seen_in="own",
)
def reads_through_bfloat16(reference):
    """float32 weights pass through bfloat16 on their way."""

    def change(model):
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())

    return changed(reference, change)


@fault(role="load_pretrained", caught_by=SHARDED, seen_in="own")
def reads_the_first_shard_only(reference):
    """What is in the other shards stays as it was initialised."""

    def change(directory, fields, tensors):
        first = checkpoints.read_file(min(directory.glob("*.safetensors")))
        for name in tensors.keys() - first.keys():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            tensors[name] = torch.full_like(tensors[name], center)

    return from_a_copy(reference, change)


@fault(role="load_pretrained", caught_by=DTYPES, seen_in="own")
def forgets_the_compute_dtype(reference):
    """Computes in the dtype of the parameters."""

    def load_pretrained(directory, stack, dtype=None, device="cpu", compute_dtype=None):
        return reference.load_pretrained(directory, stack, dtype, device)

    return load_pretrained


@fault(role="load_pretrained", caught_by=f"{DTYPES}[torch.bfloat16]", seen_in="own")
def keeps_the_stored_dtype(reference):
    """Parameters are bfloat16 although float32 was asked for."""

    def load_pretrained(directory, stack, dtype=None, device="cpu", compute_dtype=None):
        return reference.load_pretrained(directory, stack, None, device, compute_dtype)

    return load_pretrained


@benign(
    role="load_pretrained",
    accepted_by=[IMPORT, DTYPES],
    because="the stored bits, by another way",
)
def loads_the_state_at_once(reference):
    """Reads all tensors with the library's own function and copies them into a built model."""

    def load_pretrained(directory, stack, dtype=None, device="cpu", compute_dtype=None):
        tensors = checkpoints.read(directory)
        model = reference.load_pretrained(directory, stack, dtype, device, compute_dtype)
        if model.config.tied_head:
            tensors[HEAD] = tensors[EMBEDDING]
        model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items()})
        return model

    return load_pretrained


@benign(
    role="load_pretrained",
    accepted_by=[IMPORT, FIELDS, TENSORS, FILES],
    because="where a file lies does not change it",
)
def loads_from_a_local_copy(reference):
    """Copies the folder to fast storage first."""

    def load_pretrained(directory, stack, *options):
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(directory, Path(folder) / "copy")
            return reference.load_pretrained(copy, stack, *options)

    return load_pretrained
