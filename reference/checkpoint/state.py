"""Snapshot: everything of a training run at one instant, copied."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from reference.checkpoint.description import (
    Json,
    difference,
    layouts,
    local_parts,
    model_config,
    named_tensors,
    parameter_names,
    same_in_json,
    settings_fields,
    weight_decays,
)
from reference.checkpoint.peers import ALONE, Peers, peers_of
from reference.checkpoint.random_state import random_state, set_random_state
from reference.checkpoint.shards import Shard, local, shards_of, world_of
from reference.checkpoint.tensors import sha256, stream
from reference.distribute import named_parameters
from reference.loss_scale import LossScaleState
from reference.optimizer import AdamState
from reference.update import Counters, TrainState, UpdateSettings

IDENTITY = ("manifest", "tokenizer", "code", "evaluation", "options")
Generators = Mapping[str, torch.Generator]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A training run between two updates. Nothing in it is shared with the run.

    config: {"family": class name, its fields}; parameters: every parameter and persistent buffer
    once; ties: {another name of a parameter: the name in `parameters`}; optimizer: by
    parameter name, missing for one that was never updated; weight_decays: of every trained
    parameter; settings: of the updates, schedule included; data: the position of the next window
    that was not consumed; random: states of the generators, uint8, keyed "cpu", "cuda:0",
    "generator:NAME", empty if they are not to be set; identity: hashes of what the run was made
    from, and the options of its command (`resumed_options`), None where not known; world: as
    world_of gives it; loss_scale: the fields of LossScaleState, or None.

    Over several ranks parameters and moments are what this rank holds, `shards` says of which part,
    and the random states are its own; the rest is the same on all ranks, which `peers` reaches.
    """

    config: Json
    parameters: dict[str, Tensor]
    ties: dict[str, str]
    optimizer: dict[str, AdamState]
    weight_decays: dict[str, float]
    settings: Json
    counters: Counters
    data: Json
    random: dict[str, Tensor]
    identity: dict[str, str | None]
    world: Json = field(default_factory=lambda: world_of({}, ALONE))
    loss_scale: Json | None = None
    shards: dict[str, Shard] = field(default_factory=dict)
    peers: Peers = ALONE


def capture(
    training: TrainState,
    settings: UpdateSettings,
    data_state: Json,
    identity: Mapping[str, str | None],
    generators: Generators | None = None,
    on_device: bool = False,
) -> Snapshot:
    """A copy of everything that the next update depends on, as far as this rank holds it.

    data_state: from the windows' `state_dict()`. identity: as in Snapshot, under the keys of
    IDENTITY; a missing key is None. generators: in use besides torch's global ones, by name.
    on_device: leave the copies of parameters and moments where they are, which is quicker and takes
    as much memory there again; otherwise they are on the CPU.

    Raises ValueError for a model without a dataclass `config`, for two parameters that share
    memory without being one, for what JSON does not give back equal, and as `shards_of`.
    """
    parameters, ties = named_tensors(training.model)
    unknown = sorted(identity.keys() - set(IDENTITY))
    if unknown:
        raise ValueError(f"identity has the keys {', '.join(IDENTITY)}, got {unknown}")
    names, peers = parameter_names(training), peers_of(training.group)

    def copied(tensor: Tensor) -> Tensor:
        tensor = local(tensor)
        device = tensor.device if on_device else torch.device("cpu")
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())

    return Snapshot(
        config=model_config(training.model),
        parameters={name: copied(tensor) for name, tensor in parameters.items()},
        ties=ties,
        optimizer={
            names[parameter]: AdamState(
                adam.step, copied(adam.first_moment), copied(adam.second_moment)
            )
            for parameter, adam in training.optimizer_state.items()
        },
        weight_decays=weight_decays(training),
        settings=settings_fields(settings),
        counters=training.counters,
        data=same_in_json("data_state", data_state),
        random=random_state(_device(training.model), generators or {}),
        identity={key: identity.get(key) for key in IDENTITY},
        world=world_of(parameters, peers),
        shards=shards_of(parameters, peers),
        peers=peers,
        loss_scale=None if training.loss_scale is None else asdict(training.loss_scale),
    )


def restore(snapshot: Snapshot, training: TrainState, generators: Generators | None = None) -> None:
    """Puts `snapshot` into `training` and into the generators, torch's global ones included.

    Generators stay as they are if the snapshot has no random state, which is so after `load` on
    another number of ranks.
    Values are copied into the parameters that are there, so ties and device stay. The data
    position is the caller's: `windows.load_state_dict(snapshot.data)`.

    Raises ValueError, before anything is changed, as restore_training does and for generators
    other than those that were captured.
    """
    require_restorable(snapshot, training)
    if snapshot.random:
        set_random_state(snapshot.random, _device(training.model), generators or {})
    restore_training(snapshot, training)


@torch.no_grad()
def restore_training(snapshot: Snapshot, training: TrainState) -> None:
    """Puts parameters, optimizer state, counters and loss scale back; no generator is touched.

    Raises ValueError, before anything is changed, for another configuration, other parameters,
    ties or weight decays, and for a loss scale with other fields.
    """
    require_restorable(snapshot, training)
    loss_scale = _loss_scale(snapshot.loss_scale)
    tensors, _ = named_tensors(training.model)
    for name, tensor in tensors.items():
        local(tensor).copy_(snapshot.parameters[name])
    parameters = dict(named_parameters(training.model))
    training.optimizer_state.clear()
    for name, adam in snapshot.optimizer.items():
        first, second = (
            torch.zeros_like(parameters[name].data, dtype=moment.dtype)
            for moment in (adam.first_moment, adam.second_moment)
        )
        local(first).copy_(adam.first_moment)
        local(second).copy_(adam.second_moment)
        training.optimizer_state[parameters[name]] = AdamState(adam.step, first, second)
    training.counters, training.loss_scale = snapshot.counters, loss_scale


def _loss_scale(fields: Json | None) -> LossScaleState | None:
    try:
        return None if fields is None else LossScaleState(**fields)
    except TypeError as error:
        raise ValueError(f"{fields} is no loss scale: {error}") from error


def require_restorable(snapshot: Snapshot, training: TrainState) -> None:
    """ValueError with the first difference if `snapshot` is not of this model and its groups."""
    tensors, ties = named_tensors(training.model)
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("config", snapshot.config, model_config(training.model)),
        ("ties", snapshot.ties, ties),
        ("parameters", layouts(snapshot.parameters), layouts(local_parts(tensors))),
        ("weight decays", snapshot.weight_decays, weight_decays(training)),
    ]
    for what, saved, wanted in pairs:
        found = difference(saved, wanted)
        if found:
            raise ValueError(f"the snapshot is of another run: {what}: {found}")


def digests(snapshot: Snapshot) -> dict[str, str]:
    """SHA-256 of every part that this rank holds, in hexadecimal.

    Of tensors: of the safetensors file that holds them. Two snapshots with equal digests are equal
    bit for bit.
    """
    tensors = {name: sha256(stream(part)) for name, part in tensor_parts(snapshot).items()}
    return tensors | json_digests(snapshot)


def tensor_parts(snapshot: Snapshot) -> dict[str, dict[str, Tensor]]:
    """The parts that are tensors; of the optimizer NAME/step, /first_moment and /second_moment."""
    optimizer = {}
    for name, adam in snapshot.optimizer.items():
        optimizer[f"{name}/step"] = torch.tensor(adam.step, dtype=torch.int64)
        optimizer[f"{name}/first_moment"] = adam.first_moment
        optimizer[f"{name}/second_moment"] = adam.second_moment
    return {"parameters": snapshot.parameters, "optimizer": optimizer, "random": snapshot.random}


def json_parts(snapshot: Snapshot) -> dict[str, Any]:
    """The parts that are JSON."""
    return {
        "config": snapshot.config,
        "ties": snapshot.ties,
        "weight_decays": snapshot.weight_decays,
        "settings": snapshot.settings,
        "counters": asdict(snapshot.counters),
        "data": snapshot.data,
        "identity": snapshot.identity,
        "world": snapshot.world,
        "loss_scale": snapshot.loss_scale,
    }


def json_digests(snapshot: Snapshot) -> dict[str, str]:
    """SHA-256 of every part that is no tensor, in hexadecimal: of its JSON with sorted keys."""
    return {name: sha256([canonical_json(part)]) for name, part in json_parts(snapshot).items()}


def canonical_json(content: Any) -> bytes:
    """The one spelling of `content`: sorted keys, indented, a final newline."""
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
