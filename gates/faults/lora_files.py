"""Adapters wrong in their files, and wrong in the ledger's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from gates.faults.lora import adapters
from harness import fault

FILES, PEFT = "m4_lora_files::test_round_trip", "m4_lora_files::test_peft_reads_them"
WEIGHTS = "adapter_model.safetensors"


def saving(reference, change):
    """A save_adapters that changes (tensors, settings) in the files."""

    def save_adapters(model, directory):
        reference.save_adapters(model, directory)
        file = directory / "adapter_config.json"
        tensors, settings = load_file(directory / WEIGHTS), json.loads(file.read_text())
        change(model, tensors, settings)
        save_file(tensors, directory / WEIGHTS)
        file.write_text(json.dumps(settings))

    return save_adapters


@fault(role="save_adapters", caught_by=FILES, seen_in="own")
def saves_the_base_with_them(reference):
    """Stores the whole model beside its adapters."""

    def change(model, tensors, settings):
        tensors |= {f"base.{name}": t.clone() for name, t in model.state_dict().items()}

    return saving(reference, change)


@fault(role="save_adapters", caught_by=FILES, seen_in="own")
def saves_one_side(reference):
    """Stores A and forgets B."""

    def change(model, tensors, settings):
        for name in [name for name in tensors if ".lora_B." in name]:
            del tensors[name]

    return saving(reference, change)


@fault(role="save_adapters", caught_by=FILES, seen_in="own")
def saves_in_half_precision(reference):
    """Rounds adapters to bfloat16 on the way to the disk."""

    def change(model, tensors, settings):
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}

    return saving(reference, change)


@fault(role="save_adapters", caught_by=[FILES, PEFT], seen_in="own")
def saves_another_scale(reference):
    """Writes the scale alpha / rank where alpha is read."""

    def change(model, tensors, settings):
        settings["lora_alpha"] /= settings["r"]

    return saving(reference, change)


@fault(role="save_adapters", caught_by=[PEFT, FILES], seen_in="own")
def exchanges_two_layers(reference):
    """Stores the adapters of layer 0 under layer 1 and the other way round."""

    def change(model, tensors, settings):
        exchanged = {}
        for name, tensor in tensors.items():
            first, _, rest = name.partition("layers.")
            index, _, rest = rest.partition(".")
            exchanged[f"{first}layers.{ {'0': '1', '1': '0'}.get(index, index) }.{rest}"] = tensor
        tensors |= exchanged

    return saving(reference, change)


def loading_whatever_fits(reference):
    """A load_adapters that takes the tensors that fit and is silent about the others."""

    def load_adapters(model, directory):
        settings = json.loads((directory / "adapter_config.json").read_text())
        rank, alpha = settings["r"], settings["lora_alpha"]
        reference.add_adapters(model, rank, alpha, settings["target_modules"], 0)
        stored = load_file(directory / WEIGHTS)
        with torch.no_grad():
            for name, layer in adapters(model):
                for side in ("lora_A", "lora_B"):
                    tensor = stored.get(f"base_model.model.model.{name}.{side}.weight")
                    weight = getattr(layer, side)["default"].weight
                    if tensor is not None and tensor.shape == weight.shape:
                        weight.copy_(tensor)
        return model

    return load_adapters


@fault(role="load_adapters", caught_by="m4_lora_files::test_refusals", seen_in="own")
def takes_what_fits(reference):
    """Loads the tensors that fit and is silent about the others and about unknown options."""
    return loading_whatever_fits(reference)


@fault(role="load_adapters", caught_by=FILES, seen_in="own")
def looks_for_other_names(reference):
    """Looks for names that are not in the file, finds none, and says nothing."""
    load_adapters = loading_whatever_fits(reference)

    def load(model, directory):
        file = directory / WEIGHTS
        tensors = {f"x.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file)
        return load_adapters(model, directory)

    return load


# --- the ledger ------------------------------------------------------------------------------

MEASURED, PUBLISHED = (f"m4_lora_ledger::test_{name}" for name in ("measured", "published"))


def counting(reference, change):
    """An adapter_memory of changed (config, rank, targets, layout)."""

    def adapter_memory(config, rank, targets, layout, zero_stage, num_ranks):
        asked = SimpleNamespace(config=config, rank=rank, targets=targets, layout=layout)
        change(asked)
        return reference.adapter_memory(
            asked.config, asked.rank, asked.targets, asked.layout, zero_stage, num_ranks
        )

    return adapter_memory


@fault(role="adapter_memory", caught_by=MEASURED, seen_in="own")
def counts_a_head_of_keys_for_every_query(reference):
    """Takes keys and values to be as wide as queries."""

    def change(asked):
        asked.config = replace(asked.config, num_kv_heads=asked.config.num_query_heads)

    return counting(reference, change)


@fault(role="adapter_memory", caught_by=[MEASURED, PUBLISHED], seen_in="own")
def counts_one_side_of_adapters(reference):
    """Counts A and B as one matrix: half of the parameters."""

    def adapter_memory(config, rank, targets, layout, zero_stage, num_ranks):
        memory = reference.adapter_memory(config, rank, targets, layout, zero_stage, num_ranks)
        half = memory.num_adapter // 2
        adapters = reference.training_memory(max(1, half), layout, zero_stage, num_ranks)
        return replace(memory, num_adapter=half, adapters=adapters)

    return adapter_memory


@fault(
    role="adapter_memory",
    caught_by=[MEASURED, PUBLISHED, "m4_lora_ledger::test_zero_stages"],
    seen_in="own",
)
def charges_the_base_in_full(reference):
    """Counts gradients and moments for frozen parameters too."""

    def adapter_memory(config, rank, targets, layout, zero_stage, num_ranks):
        memory = reference.adapter_memory(config, rank, targets, layout, zero_stage, num_ranks)
        whole = reference.training_memory(memory.num_frozen, layout, zero_stage, num_ranks)
        return replace(memory, frozen=whole)

    return adapter_memory


@fault(
    role="adapter_memory",
    caught_by=[f"m4_lora_ledger::test_zero_stages[{stage}]" for stage in (1, 2)],
    seen_in="own",
)
def divides_the_base_from_the_first_stage(reference):
    """Divides frozen weights as if they were optimizer state."""

    def adapter_memory(config, rank, targets, layout, zero_stage, num_ranks):
        memory = reference.adapter_memory(config, rank, targets, layout, zero_stage, num_ranks)
        stage = 3 if zero_stage else 0
        thin = reference.adapter_memory(config, rank, targets, layout, stage, num_ranks)
        return replace(memory, frozen=thin.frozen)

    return adapter_memory
