"""M2. One window can be learned by heart."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from gates import toys
from harness import gate
from reference.schedule import Schedule
from reference.update import UpdateSettings
from reference.window import Microbatch, Window

NUM_UPDATES = 120


@gate(
    claim="a window of random tokens is learned by heart: the loss goes from ln V towards 0",
    roles=["train", "update_window", "accumulate", "clip_grad_norm", "optimizer_step",
           "param_groups", "build_model", "token_nll"],
    not_claimed="anything about text that was not seen",
    source="a model with more parameters than targets, trained on them alone, must fit them",
)  # fmt: skip
def test_one_window(stack, rng, device, check):
    config = replace(toys.TINY, model_width=32, feed_forward_width=64, vocabulary_size=64)
    input_ids = torch.randint(64, (4, 16), generator=rng)
    labels = torch.randint(64, (4, 16), generator=rng)
    labels[1, 9:] = -100  # unequal counts: a wrong weight would show as targets left unlearned
    window = Window((Microbatch(input_ids, labels, torch.arange(16).expand(4, 16)),)).split(2)
    schedule = Schedule(
        1e-2, NUM_UPDATES * window.num_targets, warmup_tokens=10 * window.num_targets
    )
    settings = UpdateSettings(schedule, weight_decay=0.0)
    result = stack.train(
        config, stack, [window] * NUM_UPDATES, settings, 0, device, None, "overshoot", False
    )
    losses = [record.loss_nats for record in result.records]
    check.series("one window", losses)
    check(
        "first loss - ln V",
        losses[0] - math.log(64),
        within=(-0.3, 0.3),
        because="small initial weights make all tokens nearly equally likely",
        unit="nats per token",
    )
    check(
        "last loss",
        losses[-1],
        at_most=0.1,
        because="57 random targets hold 57 ln 64 nats, and 25,000 parameters can hold them",
        unit="nats per token",
    )
    score = stack.evaluate(result.model, [window.to(device)])
    check(
        "loss of the returned model",
        score.nats / score.num_tokens,
        at_most=0.1,
        because="the model that was trained is the one that comes back",
        unit="nats per token",
    )
