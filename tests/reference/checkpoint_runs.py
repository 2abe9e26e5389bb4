"""A run small enough to be saved hundreds of times, and the damage that is done to its files."""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from reference.checkpoint import capture, expected
from reference.checkpoint.peers import Peers
from reference.checkpoint.state import canonical_json
from reference.config import DecoderConfig
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import initial_model
from reference.update import TrainState, UpdateSettings, update_window
from reference.window import Microbatch, Window

STACK = SimpleNamespace(**ROLES)
CONFIG = DecoderConfig(
    vocabulary_size=11,
    model_width=8,
    feed_forward_width=8,
    num_layers=1,
    num_query_heads=2,
    num_kv_heads=1,
    head_width=4,
    max_positions=8,
)
SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=1000, warmup_tokens=100))
FILES = [
    "manifest.json",
    "state.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random-00000.safetensors",
]
DATA = {"epoch": 1, "next_window": 7}
IDENTITY = {"manifest": "a" * 64, "tokenizer": "b" * 64}


def fresh(config=CONFIG, seed=0):
    model = initial_model(config, STACK, seed)
    return TrainState(model, STACK.param_groups(model, SETTINGS.weight_decay))


def window():
    """Drawn from the global generator, so that its state matters."""
    ids = torch.randint(11, (2, 8))
    return Window((Microbatch(ids, ids, torch.arange(8).expand(2, 8)),))


def updated(training, num_updates):
    """The losses of so many updates."""
    records = [update_window(training, window(), STACK, SETTINGS) for _ in range(num_updates)]
    return [record.loss_nats for record in records]


def run_of(num_updates, config=CONFIG):
    training = fresh(config)
    torch.manual_seed(0)
    updated(training, num_updates)
    return training


def snapshot_of(training, **more):
    return capture(training, SETTINGS, DATA, IDENTITY, **more)


def expected_of(training=None):
    return expected(training or fresh(), SETTINGS, IDENTITY)


def rewritten(folder, change):
    """The manifest after `change`, hashed again, as a program would write it that is wrong."""
    content = json.loads((folder / "manifest.json").read_bytes())
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(canonical_json(content)).hexdigest()
    (folder / "manifest.json").write_bytes(canonical_json(content))


def hashed_again(folder, name):
    data = (folder / name).read_bytes()
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewritten(folder, lambda content: content["files"].update({name: record}))


def snapshots(*num_updates):
    """Of one run after so many updates."""
    training, found = run_of(0), []
    for number in num_updates:
        updated(training, number - training.counters.optimizer_steps)
        found.append(snapshot_of(training))
    return found


def names(root):
    return sorted(path.name for path in Path(root).iterdir())


def python(program, *arguments):
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent.parent}"},
    )


def peers(world_size, deadline_s=30.0):
    """Ranks that are threads, with a store in memory."""
    store = dist.HashStore()
    return [Peers(index, world_size, store, deadline_s) for index in range(world_size)]


def on_each(function, *of_ranks):
    """function(one argument of each list) in a thread for every rank; results or exceptions."""

    def call(*arguments):
        try:
            return function(*arguments)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(of_ranks[0])) as executor:
        return list(executor.map(call, *of_ranks))
