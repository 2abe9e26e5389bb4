"""What is said of a run: its tensors by name, its configuration and settings as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reference.checkpoint.shards import local
from reference.checkpoint.tensors import layout_of, some
from reference.distribute import named_parameters, original_name
from reference.lora import adapter_fields
from reference.update import TrainState, UpdateSettings

Json = dict[str, Any]


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of each."""
    return {name: local(tensor) for name, tensor in tensors.items()}


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters and persistent buffers by their first name, {further name: first name}).

    Names are those in the model that was distributed. Raises ValueError for two tensors that share
    memory without being one.
    """
    first_names: dict[int, str] = {}
    places: dict[tuple[str, int], str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for given_name, tensor in model.state_dict(keep_vars=True).items():
        name = original_name(given_name)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} in the model's state is no tensor, but {tensor!r}")
        if id(tensor) in first_names:
            ties[name] = first_names[id(tensor)]
            continue
        held = local(tensor)
        if held.numel() and not held.is_meta:
            place = (str(held.device), held.data_ptr())
            if place in places:
                raise ValueError(
                    f"{name} and {places[place]} share memory but are two tensors; tie them by "
                    "giving both modules one parameter"
                )
            places[place] = name
        first_names[id(tensor)] = name
        tensors[name] = tensor
    return tensors, ties


def model_config(model: nn.Module) -> Json:
    """{"family": class name, fields} of `model.config`, and "adapters" if the model has some.

    Of a wrapped model, of the one inside. Raises ValueError if the config is no dataclass.
    """
    inside: Any = model
    while not hasattr(inside, "config") and hasattr(inside, "module"):
        inside = inside.module
    config = getattr(inside, "config", None)
    if not is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"model.config must be a dataclass, got {config!r}")
    fields = {
        name: str(value) if isinstance(value, torch.dtype) else value
        for name, value in asdict(config).items()
    }
    adapters = adapter_fields(inside)  # their alpha is in no tensor
    described = {"family": type(config).__name__, **fields}
    return same_in_json(
        "model.config", {**described, "adapters": adapters} if adapters else described
    )


def settings_fields(settings: UpdateSettings) -> Json:
    """The settings as JSON gives them back: the schedule a dict, betas a list."""
    fields: Json = json.loads(json.dumps(asdict(settings)))
    return fields


def weight_decays(training: TrainState) -> dict[str, float]:
    """{name of every trained parameter: its group's weight decay}."""
    names = parameter_names(training)
    return {
        names[parameter]: float(group["weight_decay"])
        for group in training.groups
        for parameter in group["params"]
    }


def parameter_names(training: TrainState) -> dict[Tensor, str]:
    """The name of every parameter; ValueError if the optimizer has one that the model has not."""
    names: dict[Tensor, str] = {p: name for name, p in named_parameters(training.model)}
    grouped = {p for group in training.groups for p in group["params"]}
    if foreign := (training.optimizer_state.keys() | grouped) - names.keys():
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters that the model does not have"
        )
    return names


def layouts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """{name: dtype and shape}, such as "F32 [2, 3]"."""
    return {name: str(layout_of(tensor)) for name, tensor in tensors.items()}


def difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What differs first between the checkpoint's and the run's; None if nothing does."""
    only_saved, only_wanted = saved.keys() - wanted.keys(), wanted.keys() - saved.keys()
    if only_saved or only_wanted:
        return f"only saved {some(only_saved)}; only in this run {some(only_wanted)}"
    for name in sorted(saved):
        one, other = saved[name], wanted[name]
        if isinstance(one, dict) and isinstance(other, dict):
            if inside := difference(one, other):
                return f"{name}: {inside}"
        elif one != other:
            return f"{name} is {one!r} as saved and {other!r} in this run"
    return None


def same_in_json(what: str, content: Mapping[str, Any]) -> Json:
    """A copy through JSON, which must be equal: no tuple, no key that is no string."""
    copy: Json = json.loads(json.dumps(dict(content)))
    if copy != content:
        raise ValueError(f"{what} must be what JSON gives back equal, got {content!r}")
    return copy
