"""Losses between float32 weights, gradients and moments and bfloat16 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch

from gates.faults.optimizer import TORCH, adamw
from harness import fault
from reference.layers import Linear, cast

GATE = "m2_precision::"


class CastOnce(Linear):
    """A Linear that keeps the cast of its weight from the first forward without gradients."""

    def forward(self, x):
        if not torch.is_grad_enabled() and not hasattr(self, "kept"):
            self.kept = cast(self.weight, self.compute_dtype)
        weight = getattr(self, "kept", None)
        if weight is None or (torch.is_grad_enabled() and self.is_fresh_in_training):
            return super().forward(x)
        return self.stack.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


def with_kept_casts(reference, is_fresh_in_training):
    def build_model(config, stack):
        model = reference.build_model(config, stack)
        for module in model.modules():
            if isinstance(module, Linear):
                module.__class__ = CastOnce
                module.is_fresh_in_training = is_fresh_in_training
        return model

    return build_model


@fault(
    role="build_model",
    caught_by=f"{GATE}test_casts_are_fresh",
    seen_in="pytorch/pytorch#112583, #105211, #65766",
)
def casts_without_a_graph(reference):
    """Trains on casts that an evaluation made without a graph: the weights get no gradient."""
    return with_kept_casts(reference, is_fresh_in_training=False)


@fault(
    role="build_model", caught_by=f"{GATE}test_casts_are_fresh", seen_in="pytorch/pytorch#142234"
)
def stale_casts(reference):
    """Scores with casts from before the update."""
    return with_kept_casts(reference, is_fresh_in_training=True)


@fault(role="build_model", caught_by=f"{GATE}test_dtypes", seen_in="verl-project/verl PR#6330")
def option_without_effect(reference):
    """Accepts compute_dtype and computes in float32."""
    return lambda config, stack: reference.build_model(replace(config, compute_dtype=None), stack)


@fault(
    role="optimizer_step",
    caught_by=[f"{GATE}test_master_weight", f"{GATE}test_weights_move", TORCH],
    seen_in="workofart/ml-by-hand PR#85, pytorch/ao PR#1124, meta-pytorch/torchtune#2254",
)
def no_master_weights(reference):
    """Keeps the weights in bfloat16: a step below half their spacing is lost."""

    def optimizer_step(groups, state, learning_rate, betas, epsilon):
        reference.optimizer_step(groups, state, learning_rate, betas, epsilon)
        for group in groups:
            for parameter in group["params"]:
                parameter.data.copy_(parameter.data.bfloat16())

    return optimizer_step


@fault(role="optimizer_step", caught_by=[f"{GATE}test_dtypes", TORCH], seen_in="own")
def bfloat16_moments(reference):
    """Keeps the moments in bfloat16: a mean over 20 updates cannot follow small changes."""
    return adamw(moment_dtype=torch.bfloat16)
