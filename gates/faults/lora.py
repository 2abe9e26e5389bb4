"""Wrong adapters: started, trained, scaled or merged in another way than they say."""

from __future__ import annotations

import torch
from torch import nn

from harness import benign, fault

START, GRADIENTS, UPDATES, MERGE = (
    f"m4_lora::test_{name}" for name in ("start", "gradients", "updates", "merge")
)


def adapters(model):
    """(name, layer) of everything that has an adapter."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]


def adding(reference, change):
    """An add_adapters whose model is changed in place afterwards."""

    def add_adapters(model, rank, alpha, targets, seed):
        model = reference.add_adapters(model, rank, alpha, targets, seed)
        with torch.no_grad():
            change(model)
        return model

    return add_adapters


@fault(role="add_adapters", caught_by=START, seen_in="own")
def starts_away_from_the_base(reference):
    """Draws B too, so that the start is not the base."""

    def change(model):
        for _, layer in adapters(model):
            nn.init.normal_(layer.lora_B["default"].weight, std=1e-3)

    return adding(reference, change)


@fault(role="add_adapters", caught_by=[START, UPDATES], seen_in="own")
def starts_dead(reference):
    """A is zero like B: neither ever gets a gradient."""

    def change(model):
        for _, layer in adapters(model):
            nn.init.zeros_(layer.lora_A["default"].weight)

    return adding(reference, change)


@fault(role="add_adapters", caught_by=START, seen_in="own")
def forgets_a_target(reference):
    """Leaves the last target without an adapter."""

    def add_adapters(model, rank, alpha, targets, seed):
        return reference.add_adapters(model, rank, alpha, targets[:-1], seed)

    return add_adapters


@fault(role="add_adapters", caught_by=START, seen_in="own")
def draws_adapters_from_one_seed(reference):
    """Draws A from seed 0 whatever was asked."""

    def add_adapters(model, rank, alpha, targets, seed):
        return reference.add_adapters(model, rank, alpha, targets, 0)

    return add_adapters


@fault(role="add_adapters", caught_by=[GRADIENTS, UPDATES], seen_in="own")
def trains_the_base_too(reference):
    """Leaves the base's own parameters trained."""
    return adding(reference, lambda model: model.requires_grad_(True))


@fault(role="add_adapters", caught_by=[GRADIENTS, UPDATES], seen_in="own")
def freezes_half_of_each_adapter(reference):
    """Trains B alone."""

    def change(model):
        for _, layer in adapters(model):
            layer.lora_A["default"].weight.requires_grad_(False)

    return adding(reference, change)


@fault(role="add_adapters", caught_by=[GRADIENTS, MERGE], seen_in="own")
def ignores_alpha(reference):
    """Scales by 1 instead of alpha / rank."""

    def add_adapters(model, rank, alpha, targets, seed):
        return reference.add_adapters(model, rank, float(rank), targets, seed)

    return add_adapters


@fault(role="add_adapters", caught_by=[GRADIENTS, MERGE], seen_in="own")
def divides_by_the_root_of_the_rank(reference):
    """Scales by alpha / sqrt(rank), another method's rule, without being asked."""

    def add_adapters(model, rank, alpha, targets, seed):
        return reference.add_adapters(model, rank, alpha * rank**0.5, targets, seed)

    return add_adapters


@fault(role="param_groups", caught_by=UPDATES, seen_in="own")
def holds_frozen_parameters(reference):
    """Gives the optimizer every parameter, frozen ones too."""

    def param_groups(model, weight_decay):
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    return param_groups


# --- merging ---------------------------------------------------------------------------------


def merging(reference, scale):
    def merge_adapters(model):
        for _, layer in adapters(model):
            layer.scaling["default"] *= scale(layer)
        return reference.merge_adapters(model)

    return merge_adapters


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def merges_without_the_scale(reference):
    """W + B A."""
    return merging(reference, lambda layer: 1 / layer.scaling["default"])


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def merges_twice(reference):
    """W + 2 alpha / rank * B A: a merge after a merge."""
    return merging(reference, lambda layer: 2)


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def forgets_to_merge_one_matrix(reference):
    """Takes the last layer's down projection out of its adapter unmerged."""

    def merge_adapters(model):
        layer = adapters(model)[-1][1]
        kept = layer.get_base_layer().weight.detach().clone()
        reference.merge_adapters(model)
        with torch.no_grad():
            layer.get_base_layer().weight.copy_(kept)
        return model

    return merge_adapters


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def merges_in_half_precision(reference):
    """Rounds merged weights to bfloat16."""

    def merge_adapters(model):
        merged = [layer.get_base_layer() for _, layer in adapters(model)]
        reference.merge_adapters(model)
        for matrix in merged:
            matrix.weight.data.copy_(matrix.weight.data.bfloat16())
        return model

    return merge_adapters


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def merges_and_keeps_the_adapters(reference):
    """Adds the product to the weights and leaves the adapters in their places, switched off."""

    def merge_adapters(model):
        for _, layer in adapters(model):
            layer.merge()
        return model

    return merge_adapters


@fault(role="merge_adapters", caught_by=MERGE, seen_in="own")
def leaves_the_merged_model_frozen(reference):
    """Hands the merged model back frozen, as its base was while there were adapters."""

    def merge_adapters(model):
        return reference.merge_adapters(model).requires_grad_(False)

    return merge_adapters


# --- right, in another way -------------------------------------------------------------------


@benign(
    role="merge_adapters",
    accepted_by=MERGE,
    because="the product of all scaled columns one by one is the scaled product",
)
def merges_column_by_column(reference):
    """Adds alpha / rank * b_i a_i for each of the rank columns of B and rows of A."""

    def merge_adapters(model):
        for _, layer in adapters(model):
            A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            weight = layer.get_base_layer().weight
            with torch.no_grad():
                for column, row in zip(B.T, A, strict=True):
                    weight.addr_(column, row, alpha=layer.scaling["default"])
                B.zero_()
        return reference.merge_adapters(model)

    return merge_adapters


@benign(role="add_adapters", accepted_by=[START, GRADIENTS, UPDATES, MERGE],
        because="A may be drawn from any distribution of that deviation")  # fmt: skip
def draws_adapters_from_a_normal(reference):
    """A ~ Normal(0, 1 / (3 inputs)), the deviation of the uniform one."""

    def add_adapters(model, rank, alpha, targets, seed):
        model = reference.add_adapters(model, rank, alpha, targets, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, layer in adapters(model):
                A = layer.lora_A["default"].weight
                drawn = torch.randn(A.shape, generator=generator)
                A.copy_(drawn / (3 * A.shape[1]) ** 0.5)
        return model

    return add_adapters
