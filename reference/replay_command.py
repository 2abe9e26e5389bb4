"""The command `python -m reference.train replay DIR`: what went wrong first in a kept update."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from reference.anomaly import Kept, read
from reference.checkpoint.commit import latest
from reference.checkpoint.files import read_manifest
from reference.checkpoint.load import LocalFolder, expected, resumption
from reference.checkpoint.random_state import random_state
from reference.checkpoint.state import Snapshot, restore_training
from reference.config import CharGPTConfig, DecoderConfig, ModelConfig
from reference.finite import FirstNotFinite
from reference.loss_scale import LossScaling
from reference.options import device
from reference.schedule import Schedule
from reference.update import TrainState, UpdateRecord, UpdateSettings

FAMILIES = {"DecoderConfig": DecoderConfig, "CharGPTConfig": CharGPTConfig}


@dataclass(frozen=True)
class Replay:
    """An update that was run again: what was kept; what it did now; which tensor was not finite
    first, None if all were finite; the training after it; how exactly it goes on from the state
    that was kept, as `resumption` says it.
    """

    kept: Kept
    record: UpdateRecord
    not_finite_first: str | None
    training: TrainState
    how: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the update again; 0 if all of it is finite, 1 if not. SystemExit with 2 for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        again = replay(options.directory, options.device)
    except ValueError as error:
        parser.error(str(error))
    seen, record = again.kept.anomaly, again.record
    print(f"kept because it was {seen.kind}: {seen.reason}")
    if len(again.kept.num_microbatches) > 1:
        print(_about_ranks(again))
    print(f"loss {record.loss_nats} nats per token (was {seen.loss_nats}), gradient norm "
          f"{record.grad_norm} (was {seen.grad_norm})")  # fmt: skip
    if again.not_finite_first:
        print(f"not finite first: {again.not_finite_first}")
        return 1
    print("the update is finite; gradient norms by module, in the order of the model:")
    for name, norm in _norms_by_module(again.training.model).items():
        print(f"{norm:12.4g}  {name}")
    return 0


def replay(directory: Path, device: torch.device | str = "cpu") -> Replay:
    """Runs the update that `keep` wrote into `directory` again, on this process.

    What several ranks kept is run on the microbatches of all of them, in rank order: the sums are
    those of the ranks in another order, and random states are not taken over, so that a model with
    dropout drops others.

    Raises ValueError for a folder that is no kept anomaly, or whose checkpoint is another state
    than the one it was kept with.
    """
    from reference.stack import ROLES  # which imports reference.train

    stack, device = SimpleNamespace(**ROLES), torch.device(device)
    kept = read(directory)
    settings = _settings(kept.settings)
    training, how = _state_before(directory, device, kept, settings, stack)
    with FirstNotFinite(training, stack) as first:
        window = kept.window.to(device)
        looking = replace(settings, on_non_finite="skip")  # an error would end it here again
        record = stack.update_window(training, window, stack, looking)
    return Replay(kept, record, first.found, training, how)


def _about_ranks(again: Replay) -> str:
    by_rank = again.kept.num_microbatches
    numbers = " + ".join(map(str, by_rank))
    return f"kept by {len(by_rank)} ranks, microbatches in rank order: {numbers}; {again.how}"


def _state_before(
    directory: Path, device: torch.device, kept: Kept, settings: UpdateSettings, stack: Any
) -> tuple[TrainState, str]:
    newest = latest(directory)
    if newest is None:
        raise ValueError(f"{directory} holds no checkpoint of the state before the update")
    model = _model(kept.config, stack).to(device)
    training = TrainState(model, stack.param_groups(model, settings.weight_decay))
    want = expected(training, settings)
    before: Snapshot = stack.load(newest, want)
    if read_manifest(LocalFolder(newest)).parts != kept.digests:  # load held the files against it
        raise ValueError(f"{newest} is not the state that {directory} was kept with")
    restore_training(before, training)
    _restore_generators(before, device)
    return training, resumption(before.world, want.world)


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
