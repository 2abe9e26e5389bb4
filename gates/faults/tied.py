"""Heads that are said to be tied and are not."""

from __future__ import annotations

import torch
from torch import nn

from gates.faults.model import decoder_changed_by
from harness import fault

TIED = "m1_tied::"
MEMORY, COUNTED = f"{TIED}test_same_memory", f"{TIED}test_counted_once"


def cloned(model):
    if model.config.tied_head:
        model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach().clone())


def without_head(module, state, prefix, metadata):
    del state[f"{prefix}lm_head.weight"]


def head_from_embedding(module, incompatible_keys):
    module.lm_head.weight.data.copy_(module.embed_tokens.weight)


@fault(role="build_model", caught_by=[MEMORY, COUNTED], seen_in="NVIDIA-NeMo/Automodel PR#2511")
def ties_by_copying(reference):
    """The configuration says tied; the head is a copy, made again after every move or load."""

    def change(model):
        class Copying(type(model)):
            def _tie(self):
                cloned(self)

        model.__class__ = Copying
        cloned(model)

    return decoder_changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=[f"{MEMORY}[meta]", f"{COUNTED}[meta]"],
    seen_in="verl-project/verl PR#7835",
)
def unties_in_to_empty(reference):
    """Tied when built; to_empty gives each module a memory of its own."""

    def change(model):
        class Untied(type(model)):
            _apply = nn.Module._apply

        model.__class__ = Untied

    return decoder_changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=[f"{MEMORY}[assign]", f"{COUNTED}[assign]"],
    seen_in="own",
)
def unties_in_a_load_by_assignment(reference):
    """load_state_dict(assign=True) puts in two tensors, and nothing ties them again."""
    return decoder_changed_by(reference, lambda model: model._load_state_dict_post_hooks.clear())


@fault(
    role="build_model",
    caught_by=[f"{MEMORY}[deepcopy]", f"{COUNTED}[deepcopy]"],
    seen_in="own",
)
def unties_in_a_deepcopy(reference):
    """The copy is made module by module, each with parameters of its own."""

    def change(model):
        kind = type(model)

        class Copied(kind):
            def __deepcopy__(self, memo):
                twin = kind(self.config, self.stack).to(self.norm.weight)
                twin.load_state_dict(self.state_dict())
                cloned(twin)
                return twin

        model.__class__ = Copied

    return decoder_changed_by(reference, change)


@fault(
    role="build_model", caught_by=f"{TIED}test_state[with]", seen_in="NVIDIA-NeMo/Automodel#2571"
)
def omits_the_head_of_a_state(reference):
    """The state leaves the head out, since the configuration says tied; the tensors are two."""

    def change(model):
        if model.config.tied_head:

            class Omitting(type(model)):
                def _tie(self):
                    pass

            model.__class__ = Omitting
            cloned(model)
            model.register_state_dict_post_hook(without_head)
            model.register_load_state_dict_post_hook(head_from_embedding)

    return decoder_changed_by(reference, change)


@fault(
    role="build_model",
    caught_by=f"{TIED}test_state[without]",
    seen_in="huggingface/transformers PR#43429",
)
def draws_a_head_that_a_state_omits(reference):
    """A state without a head leaves the random one, although the configuration says tied."""

    def change(model):
        if model.config.tied_head:
            head = torch.empty_like(model.lm_head.weight).normal_(std=0.02)

            def untie(module, keys):
                if "lm_head.weight" in keys.missing_keys:
                    module.lm_head.weight = nn.Parameter(head.to(module.norm.weight))

            model.register_load_state_dict_post_hook(untie)

    return decoder_changed_by(reference, change)


@fault(role="build_model", caught_by=f"{TIED}test_gradient_is_the_sum", seen_in="own")
def reads_the_embedding_without_a_gradient(reference):
    """One table, but the lookup is cut off: it gets the gradient of the head alone."""

    def change(model):
        model.embed_tokens.register_forward_hook(lambda module, ids, output: output.detach())

    return decoder_changed_by(reference, change)


@fault(role="param_groups", caught_by=COUNTED, seen_in="own")
def groups_every_name(reference):
    """Goes through modules and not through parameters, so that a shared one comes twice."""

    def param_groups(model, weight_decay):
        every = [p for _, p in model.named_parameters(remove_duplicate=False)]
        return [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0},
        ]

    return param_groups
