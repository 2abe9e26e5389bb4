"""The command `python -m reference.train replay DIR`: what went wrong first in a kept update."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from reference.anomaly import Kept, read
from reference.checkpoint.commit import latest
from reference.checkpoint.load import expected
from reference.checkpoint.random_state import random_state
from reference.checkpoint.state import Snapshot, digests, restore_training
from reference.config import CharGPTConfig, DecoderConfig, ModelConfig
from reference.finite import FirstNotFinite
from reference.loss_scale import LossScaling
from reference.options import device
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings

FAMILIES = {"DecoderConfig": DecoderConfig, "CharGPTConfig": CharGPTConfig}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the update again; 0 if all of it is finite, 1 if not. SystemExit with 2 for bad input."""
    from reference.stack import ROLES  # which imports reference.train

    parser = _parser()
    options = parser.parse_args(arguments)
    stack = SimpleNamespace(**ROLES)
    try:
        kept = read(options.directory)
        settings = _settings(kept.settings)
        training = _state_before(options, kept, settings, stack)
    except ValueError as error:
        parser.error(str(error))
    print(f"kept because it was {kept.anomaly.kind}: {kept.anomaly.reason}")
    with FirstNotFinite(training, stack) as first:
        window = kept.window.to(options.device)
        looking = replace(settings, on_non_finite="skip")  # an error would end it here again
        record = stack.update_window(training, window, stack, looking)
    seen = kept.anomaly
    print(f"loss {record.loss_nats} nats per token (was {seen.loss_nats}), gradient norm "
          f"{record.grad_norm} (was {seen.grad_norm})")  # fmt: skip
    if first.found:
        print(f"not finite first: {first.found}")
        return 1
    print("the update is finite; gradient norms by module, in the order of the model:")
    for name, norm in _norms_by_module(training.model).items():
        print(f"{norm:12.4g}  {name}")
    return 0


def _state_before(
    options: argparse.Namespace, kept: Kept, settings: UpdateSettings, stack: Any
) -> TrainState:
    newest = latest(options.directory)
    if newest is None:
        raise ValueError(f"{options.directory} holds no checkpoint of the state before the update")
    model = _model(kept.config, stack).to(options.device)
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    before: Snapshot = stack.load(newest, expected(training, settings))
    if digests(before) != kept.digests:
        raise ValueError(f"{newest} is not the state that {options.directory} was kept with")
    restore_training(before, training)
    _restore_generators(before, options.device)
    return training


def _model(config: dict[str, Any], stack: Any) -> nn.Module:
    fields = dict(config)
    adapters = fields.pop("adapters", None)
    family = FAMILIES.get(fields.pop("family", ""))
    if family is None:
        raise ValueError(f"{config.get('family')!r} is no known family of models")
    try:
        dtype = fields["compute_dtype"]
        fields["compute_dtype"] = dtype and getattr(torch, dtype.removeprefix("torch."))
        shape: ModelConfig = family(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{config} is no {family.__name__}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = stack.build_model(shape, stack)
    if adapters:
        stack.add_adapters(model, adapters["rank"], adapters["alpha"], adapters["targets"], 0)
    return model


def _settings(fields: dict[str, Any]) -> UpdateSettings:
    try:
        schedule, betas = Schedule(**fields["schedule"]), tuple(fields["betas"])
        scaling = fields["loss_scaling"] and LossScaling(**fields["loss_scaling"])
        rebuilt = {"schedule": schedule, "betas": betas, "loss_scaling": scaling}
        return UpdateSettings(**{**fields, **rebuilt})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{fields} are no settings of an update: {error!r}") from error


def _restore_generators(before: Snapshot, device: torch.device) -> None:
    """Those that are here too: another device draws from another generator anyway."""
    for key, state in before.random.items():
        if key == "cpu":
            torch.set_rng_state(state)
        elif key in random_state(device, {}):
            torch.get_device_module(device).set_rng_state(state, device)


def _norms_by_module(model: nn.Module) -> dict[str, float]:
    """sqrt(sum of g^2) over the gradients of each module's own parameters, after the clip."""
    norms = {}
    for name, module in model.named_modules():
        gradients = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if gradients:
            parts = torch.stack([torch.linalg.vector_norm(g.double().cpu()) for g in gradients])
            norms[name or "the model"] = float(torch.linalg.vector_norm(parts))
    return norms


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference.train replay",
        description="Run an update again that training kept as an anomaly, on one process, and say "
        "which module and tensor went wrong first. Exit status 1 if one is not finite, else 0.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR/anomaly-N")
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda or npu")
    return parser
