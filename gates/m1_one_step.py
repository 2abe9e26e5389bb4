"""M1. One whole update is finite, moves every parameter and lowers the loss of its window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gates import ladder, toys
from harness import gate
from reference.config import preset
from reference.schedule import Schedule
from reference.update import TrainState, UpdateSettings
from reference.window import Microbatch, Window

SHAPES = pytest.mark.parametrize("shape", ["rung", "chargpt"])
COMPUTE = pytest.mark.parametrize("compute", ["own", "bfloat16"])
SETTINGS = UpdateSettings(Schedule(peak=1e-3, total_tokens=2**40), weight_decay=0.0)


def config_of(stack, shape, compute, rung):
    config = preset("chargpt-smoke") if shape == "chargpt" else ladder.one_layer(rung)
    return replace(
        config, compute_dtype=toys.require_bfloat16(stack) if compute == "bfloat16" else None
    )


def packed_window(rng, vocabulary_size):
    """Two microbatches; a document of one token, padding, and rows without a break."""
    num_tokens = 32
    ids = torch.randint(1, vocabulary_size, (4, num_tokens), generator=rng)
    documents = torch.zeros(4, num_tokens, dtype=torch.int32)
    documents[0, 1:] = 1
    documents[1, 20:] = 2  # padding: token 0, no target
    ids[1, 20:] = 0
    labels = torch.where(documents == 2, -100, ids.roll(-1, 1))
    labels[:, -1] = -100
    labels[0, 0], labels[1, 19] = -100, -100
    positions = torch.arange(num_tokens).repeat(4, 1)
    positions[0, 1:] -= 1
    positions[1, 20:] -= 20
    return Window((Microbatch(ids, labels, positions, documents),)).split(2)


@gate(
    claim="one update has a finite loss and gradient norm, leaves finite parameters, moves each of "
    "them, and lowers the loss of its own window",
    roles=["build_model", "accumulate", "clip_grad_norm", "optimizer_step", "update_window"],
    not_claimed="the full depth of a rung; further updates",
    source="a smoke test of everything together, at the true width of the rung",
)
@COMPUTE
@SHAPES
def test_one_update(stack, shape, compute, rung, rng, device, check):
    config = config_of(stack, shape, compute, rung)
    model = stack.build_model(config, stack).to(device)
    with torch.no_grad():
        model.embed_tokens.weight[0] = 0.0  # the table's row of a padding token
    window = packed_window(rng, config.vocabulary_size).to(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = TrainState(model, stack.param_groups(model, SETTINGS.weight_decay))
    record = stack.update_window(training, window, stack, SETTINGS)
    check("skipped", str(record.skipped), equal="None", because="the window has targets")
    check("loss", record.loss_nats, within=(0.0, 1e3), because="finite", unit="nats")
    check("gradient norm", record.grad_norm, within=(1e-6, 1e6), because="finite and not zero")
    infinite = [n for n, p in model.named_parameters() if not bool(p.isfinite().all())]
    check("parameters that are not finite", infinite, equal=[], because="one bad row spreads")
    still = [n for n, p in model.named_parameters() if not bool((p != before[n]).any())]
    check("parameters that stood still", still, equal=[], because="each has a gradient")
    after = stack.accumulate(model, window, None)
    gain = record.loss_nats - after.nll_sum / after.num_targets
    check("loss of the window, before less after", gain, at_least=0.01,
          because="Adam steps 1e-3 down every coordinate", unit="nats")  # fmt: skip
