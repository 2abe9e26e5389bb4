"""Wrappers that change the model that they wrap."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import fault
from reference.distribute import DistributionSettings

GATE = "m6_wrapping::"


def recompute(model, **options):
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
    return model


@fault(
    role="distribute",
    caught_by=f"{GATE}test_parameters[2-tied]",
    seen_in="NVIDIA-NeMo/Automodel PR#2511, facebookresearch/lingua PR#75, "
    "verl-project/verl#7834, meta-pytorch/torchtune#616",
)
def gives_the_head_a_table(reference):
    """Gives the head a table of its own, as separate FSDP2 units of embedding and head do."""

    def distribute(model, mesh, settings):
        model = reference.distribute(model, mesh, settings)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return distribute


@fault(
    role="distribute",
    caught_by=[f"{GATE}test_recomputed_layers[{ranks}]" for ranks in (1, 2)],
    seen_in="allenai/OLMo-core PR#828, pytorch/torchtitan#1323",
)
def drops_anew_in_the_backward(reference):
    """Recomputes layers without the random state of their first computation."""

    def distribute(model, mesh, settings):
        model = reference.distribute(model, mesh, DistributionSettings(settings.compute_dtype))
        if not settings.checkpoint_activations:
            return model
        return recompute(model, preserve_rng_state=False)

    return distribute


@fault(role="distribute", caught_by=f"{GATE}test_recomputed_layers[2]", seen_in="own")
def keeps_every_activation(reference):
    """Takes no notice of checkpoint_activations."""
    return lambda model, mesh, settings: reference.distribute(
        model, mesh, DistributionSettings(settings.compute_dtype)
    )


@fault(role="distribute", caught_by=f"{GATE}test_parameters[2-untied]", seen_in="own")
def names_with_a_prefix(reference):
    """Puts the model into another one, whose prefix nobody takes off."""

    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner, self.stack, self.lm_head = model, model.stack, model.lm_head

        def forward(self, *inputs):
            return self.inner(*inputs)

    return lambda model, mesh, settings: Wrapped(reference.distribute(model, mesh, settings))


@fault(
    role="distribute",
    caught_by="m6_collectives::test_traffic[2]",
    seen_in="huggingface/accelerate PR#1726 (no no_sync at all)",
)
def reduces_what_ddp_has_reduced(reference):
    """Wraps in DDP, which averages after every microbatch, for an accumulate that sums once more.

    The sum of equal averages is the right gradient; only the traffic is four times as much.
    """

    class Wrapped(DistributedDataParallel):
        stack = property(lambda self: self.module.stack)
        lm_head = property(lambda self: self.module.lm_head)

    return lambda model, mesh, settings: Wrapped(reference.distribute(model, mesh, settings))


@fault(role="distribute", caught_by="m6_collectives::test_traffic[2]", seen_in="own")
def declares_the_traffic_of_ddp(reference):
    """Says that it speaks as DDP does, in a few buckets, and reduces gradient by gradient."""

    def distribute(model, mesh, settings):
        return reference.distribute(model, mesh, settings)

    distribute.communication = "ddp"
    return distribute


@fault(role="distribute", caught_by=f"{GATE}test_parameters[3-tied]", seen_in="own")
def rounds_what_it_broadcasts(reference):
    """Rounds every parameter to bfloat16 on its way to the other ranks."""

    def distribute(model, mesh, settings):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)
        return reference.distribute(model, mesh, settings)

    return distribute
