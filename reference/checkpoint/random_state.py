"""The states of torch's random generators: global ones of CPU and device, and named ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

NAMED = "generator:"


def random_state(
    device: torch.device, generators: Mapping[str, torch.Generator]
) -> dict[str, Tensor]:
    """{"cpu": …, "cuda:0": …, "generator:NAME": …}, each [bytes] uint8 on the CPU.

    Of the devices, only `device`. Python's own and numpy's generators are not captured: the
    reference draws from torch's alone.
    """
    return {
        key: generator.get_state().clone()
        for key, generator in _generators(device, generators).items()
    }


def set_random_state(
    states: Mapping[str, Tensor],
    device: torch.device,
    generators: Mapping[str, torch.Generator],
) -> None:
    """Sets the same generators to `states`.

    Raises ValueError, before any is changed, if the states are not of these generators.
    """
    ours = _generators(device, generators)
    if ours.keys() != states.keys():
        raise ValueError(
            f"random states were saved of {', '.join(sorted(states))}; this run draws from "
            f"{', '.join(sorted(ours))}"
        )
    before = {key: generator.get_state() for key, generator in ours.items()}
    for key, state in states.items():
        if (state.dtype, state.shape) != (torch.uint8, before[key].shape):
            raise ValueError(
                f"the random state of {key} must be uint8 {list(before[key].shape)}, got "
                f"{state.dtype} {list(state.shape)}"
            )
    for key, state in states.items():
        try:
            ours[key].set_state(state)
        except RuntimeError as error:
            for other, old in before.items():
                ours[other].set_state(old)
            raise ValueError(f"the random state of {key} is none: {error}") from error


def _generators(
    device: torch.device, generators: Mapping[str, torch.Generator]
) -> dict[str, torch.Generator]:
    found = {"cpu": torch.default_generator}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.init()
        index = module.current_device() if device.index is None else device.index
        found[f"{device.type}:{index}"] = module.default_generators[index]
    return found | {NAMED + name: generator for name, generator in generators.items()}
