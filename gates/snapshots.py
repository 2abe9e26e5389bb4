"""States of training taken apart: a fingerprint of every part, and toy states to save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gates import toys
from reference.checkpoint.shards import local
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings


def parts(value: Any) -> dict[str, str]:
    """Every leaf of nested dataclasses, mappings and sequences by its path, as comparable text.

    A tensor is its dtype, shape and the SHA-256 of its bytes (of a DTensor, of those that this rank
    holds); two that are equal bit for bit have the same text, 0.0 and -0.0 do not. Anything else is
    its repr, which is exact for floats.
    """
    return dict(_leaves(value, ""))


def differing(got: dict[str, str], want: dict[str, str]) -> list[str]:
    """Paths that are in one only, or whose text differs."""
    return sorted(path for path in got.keys() | want.keys() if got.get(path) != want.get(path))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Tensor):
        value = local(value)
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = hashlib.sha256(raw.numpy().data).hexdigest()
        yield path, f"{value.dtype} {tuple(value.shape)} {digest}"
        return
    inner = _items(value)
    if inner is None:
        yield path, repr(value)
        return
    if not inner:
        yield path, "empty"
    for name, one in inner.items():
        yield from _leaves(one, f"{path}/{name}" if path else str(name))


def _items(value: Any) -> dict[str, Any] | None:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): one for index, one in enumerate(value)}
    return None


def of_training(training: TrainState) -> dict[str, str]:
    """The parts of a running training, its random state and which parameters share memory."""
    parameters = dict(training.model.named_parameters(remove_duplicate=False))
    names = {p: name for name, p in reversed(parameters.items())}  # the first name of a shared one
    first_at: dict[int, str] = {}
    for name, p in parameters.items():
        first_at.setdefault(local(p).data_ptr(), name)
    random = {"cpu": torch.get_rng_state()}
    device = next(iter(parameters.values())).device
    if device.type != "cpu":
        random[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return parts(
        {
            "parameters": parameters,
            "shared": {name: first_at[local(p).data_ptr()] for name, p in parameters.items()},
            "optimizer": {
                names.get(p, f"unknown {tuple(p.shape)}"): state
                for p, state in training.optimizer_state.items()
            },
            "decay": [
                [group["weight_decay"], [names.get(p, "unknown") for p in group["params"]]]
                for group in training.groups
            ],
            "counters": training.counters,
            "loss_scale": training.loss_scale,
            "random": random,
        }
    )


SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=400, warmup_tokens=100))


def trained(stack: Any, rng: torch.Generator, num_updates: int = 3, **changes: Any) -> TrainState:
    """A tiny decoder on the CPU after a few updates; its last bias has had one update fewer.

    So the step of the optimizer is a count of each parameter, and no two moments are alike.
    """
    model = toys.tiny_model(stack, torch.device("cpu"), **changes)
    training = TrainState(model, stack.param_groups(model, SETTINGS.weight_decay))
    late = model.layers[-1].self_attn.k_proj.bias
    for index in range(num_updates):
        late.requires_grad_(index > 0)
        update(stack, training, rng)
    late.requires_grad_(True)
    return training


def update(stack: Any, training: TrainState, rng: torch.Generator) -> None:
    """One more update, in place, on random tokens."""
    window = toys.ragged_window(rng, (7, 3, 0, 5))
    stack.update_window(training, window, stack, SETTINGS)
