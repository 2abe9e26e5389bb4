"""Weights written wrongly: bits, names, shards, fields, folders."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gates import checkpoints
from gates.checkpoints import EMBEDDING, HEAD
from harness import benign, fault

EXPORT, LOADS = "m4_export::test_export", "m4_export::test_transformers_loads"
BACK, REFUSED = "m4_export::test_round_trip", "m4_export::test_refused"
EVERYWHERE = [EXPORT, BACK, LOADS]
INDEX = "model.safetensors.index.json"


def of(gates: list[str], *cases: str) -> list[str]:
    return [f"{gate}[{case}]" for gate in gates for case in cases]


TIED = ("qwen2-tied", "llama-tied-sharded")
SHARDED = ("qwen2-untied-sharded", "llama-tied-sharded", "llama-bfloat16")
QWEN2 = ("qwen2-tied", "qwen2-untied-sharded")


def rewritten(reference, change: Callable[[dict[str, Any], dict[str, Any]], Any]):
    """save_pretrained with its fields and tensors changed before they are written."""

    def save_pretrained(model, directory, max_shard_bytes=2**30, tokenizer=None, eos=None):
        with tempfile.TemporaryDirectory() as folder:
            right = Path(folder) / "right"
            reference.save_pretrained(model, right, max_shard_bytes, tokenizer, eos)
            fields = json.loads((right / "config.json").read_text())
            tensors = checkpoints.read(right)
            num_files = len(list(right.glob("*.safetensors")))
        change(fields, tensors)
        checkpoints.write(directory, fields, tensors, num_files)

    return save_pretrained


def afterwards(reference, change: Callable[[Path], Any]):
    """save_pretrained, and then something done to its folder."""

    def save_pretrained(model, directory, *options):
        reference.save_pretrained(model, directory, *options)
        change(directory)

    return save_pretrained


@fault(role="save_pretrained", caught_by=of([EXPORT], *TIED), seen_in="own")
def stores_a_tied_head_again(reference):
    """The table is stored under both names."""

    def change(fields, tensors):
        if fields["tie_word_embeddings"]:
            tensors[HEAD] = tensors[EMBEDDING].clone()

    return rewritten(reference, change)


@fault(
    role="save_pretrained",
    caught_by=of(EVERYWHERE, *TIED),
    seen_in="NVIDIA-NeMo/Automodel PR#2511",
)
def leaves_out_that_the_head_is_tied(reference):
    """The head is left out because it is tied, and the configuration does not say that it is."""
    return rewritten(reference, lambda fields, _: fields.pop("tie_word_embeddings"))


@fault(role="save_pretrained", caught_by=EVERYWHERE, seen_in="own")
def stores_gate_as_up(reference):
    """Two tensors of one shape change names."""

    def change(fields, tensors):
        for name in [name for name in tensors if "gate_proj" in name]:
            other = name.replace("gate_proj", "up_proj")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return rewritten(reference, change)


@fault(
    role="save_pretrained",
    caught_by=of(EVERYWHERE, "qwen2-tied", "qwen2-untied-sharded", "llama-untied"),
    seen_in="own",
)
def saves_in_bfloat16(reference):
    """float32 weights are rounded on the way out."""

    def change(fields, tensors):
        fields["dtype"] = "bfloat16"
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()

    return rewritten(reference, change)


@fault(role="save_pretrained", caught_by=of(EVERYWHERE, *QWEN2), seen_in="own")
def stores_no_biases(reference):
    """Only tensors called weight are stored."""

    def change(fields, tensors):
        for name in [name for name in tensors if name.endswith("bias")]:
            del tensors[name]

    return rewritten(reference, change)


@fault(role="save_pretrained", caught_by=EVERYWHERE, seen_in="lyogavin/airllm PR#369")
def leaves_out_theta(reference):
    """Readers take rope_theta 10000."""

    def change(fields, tensors):
        fields.pop("rope_theta", None)
        fields.pop("rope_parameters", None)

    return rewritten(reference, change)


@fault(role="save_pretrained", caught_by=EVERYWHERE, seen_in="own")
def leaves_out_epsilon(reference):
    """Readers take rms_norm_eps 1e-6."""
    return rewritten(reference, lambda fields, _: fields.pop("rms_norm_eps"))


@fault(role="save_pretrained", caught_by=[EXPORT, BACK], seen_in="own")
def leaves_out_the_head_width(reference):
    """Readers take hidden_size / num_attention_heads."""
    return rewritten(reference, lambda fields, _: fields.pop("head_dim"))


@fault(role="save_pretrained", caught_by=LOADS, seen_in="own")
def forgets_the_end_of_a_document(reference):
    """The eos_token_id that was given is not written."""
    return rewritten(reference, lambda fields, _: fields.update(eos_token_id=None))


@fault(role="save_pretrained", caught_by=of([EXPORT, BACK], *SHARDED), seen_in="own")
def writes_every_shard_over_the_first(reference):
    """All shards are written under the name of one, and the last stays."""

    def change(directory):
        files = sorted(directory.glob("*.safetensors"))
        for file in files[1:]:
            file.replace(files[0])
        if len(files) > 1:
            index = json.loads((directory / INDEX).read_text())
            index["weight_map"] = dict.fromkeys(index["weight_map"], files[0].name)
            (directory / INDEX).write_text(json.dumps(index))

    return afterwards(reference, change)


@fault(role="save_pretrained", caught_by=of([EXPORT, BACK], *SHARDED), seen_in="own")
def numbers_the_index_from_another_shard(reference):
    """The index names for each tensor the file after its own."""

    def change(directory):
        files = sorted(file.name for file in directory.glob("*.safetensors"))
        if len(files) > 1:
            following = dict(zip(files, files[1:] + files[:1], strict=True))
            index = json.loads((directory / INDEX).read_text())
            names = index["weight_map"]
            index["weight_map"] = {name: following[file] for name, file in names.items()}
            (directory / INDEX).write_text(json.dumps(index))

    return afterwards(reference, change)


@fault(role="save_pretrained", caught_by=of([EXPORT], *SHARDED), seen_in="own")
def writes_one_file_whatever_the_limit(reference):
    """max_shard_bytes is passed over."""

    def save_pretrained(model, directory, max_shard_bytes=2**30, *options):
        reference.save_pretrained(model, directory, 2**40, *options)

    return save_pretrained


@fault(role="save_pretrained", caught_by=f"{REFUSED}[taken]", seen_in="own")
def clears_the_folder_first(reference):
    """What was there is gone, whoever wrote it."""

    def save_pretrained(model, directory, *options):
        shutil.rmtree(directory, ignore_errors=True)
        reference.save_pretrained(model, directory, *options)

    return save_pretrained


@fault(
    role="save_pretrained",
    caught_by=of([REFUSED], "untied", "two-dtypes", "another-tensor"),
    seen_in="own",
)
def makes_the_folder_before_it_looks(reference):
    """A refused export leaves a folder that looks like one."""

    def save_pretrained(model, directory, *options):
        if not directory.exists():
            directory.mkdir()
            (directory / "config.json").write_text("{}")
        reference.save_pretrained(model, directory, *options)

    return save_pretrained


@fault(
    role="save_pretrained",
    caught_by=of([REFUSED], "untied", "two-dtypes", "another-tensor"),
    seen_in="NVIDIA-NeMo/Automodel#2571",
)
def writes_what_the_configuration_names(reference):
    """A head that was untied, another dtype, a tensor too many: passed over in silence."""

    def save_pretrained(model, directory, *options):
        tensors = {
            name: model.get_parameter(name.removeprefix("model.")).detach().float()
            for name in checkpoints.shapes(model.config)
        }
        right = checkpoints.reference_model(model.config, tensors)
        reference.save_pretrained(right, directory, *options)

    return save_pretrained


@benign(role="save_pretrained", accepted_by=EVERYWHERE, because="the files of transformers itself")
def saves_through_transformers(reference):
    """Copies the weights into transformers' own model and saves that."""

    def save_pretrained(model, directory, max_shard_bytes=2**30, tokenizer=None, eos=None):
        import transformers

        fields = checkpoints.published_fields(model.config) | {"eos_token_id": eos}
        theirs = getattr(transformers, fields["architectures"][0])(
            transformers.AutoConfig.for_model(**fields)
        )
        parameters = checkpoints.parameters(model)
        theirs.to(next(iter(parameters.values())).dtype).load_state_dict(parameters)
        theirs.save_pretrained(directory, max_shard_size=max_shard_bytes)

    return save_pretrained


@benign(role="save_pretrained", accepted_by=EVERYWHERE, because="below any limit, and whole")
def writes_a_file_for_every_tensor(reference):
    """As many shards as there are tensors."""

    def save_pretrained(model, directory, max_shard_bytes=2**30, *options):
        reference.save_pretrained(model, directory, 1, *options)

    return save_pretrained
