"""M1. Tied means one table: the same memory after every construction, and one summed gradient."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import relative_error


def built(stack, device, tied):
    config = replace(probes.DECODER, tied_head=tied)
    return stack.build_model(config, stack).to(device)


def built_on_meta(stack, device, tied):
    with torch.device("meta"):
        model = built(stack, "meta", tied)
    return model.to_empty(device=device)


def loaded_by_assignment(stack, device, tied):
    model = built_on_meta(stack, device, tied)
    state = {name: t.clone() for name, t in built(stack, device, tied).state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def loaded_from_a_file(stack, device, tied):
    file = io.BytesIO()
    torch.save(built(stack, device, tied).state_dict(), file)
    file.seek(0)
    model = built(stack, device, tied)
    model.load_state_dict(torch.load(file, map_location=device))
    return model


CONSTRUCTIONS = {
    "direct": built,
    "meta": built_on_meta,
    "deepcopy": lambda stack, device, tied: copy.deepcopy(built(stack, device, tied)),
    "to": lambda stack, device, tied: built(stack, device, tied).to(torch.bfloat16),
    "assign": loaded_by_assignment,
    "file": loaded_from_a_file,
}
PATHS = pytest.mark.parametrize("path", CONSTRUCTIONS)


def tables(model):
    return model.embed_tokens.weight, model.lm_head.weight


@gate(
    claim="a tied head and the embedding are one Parameter in one memory, however the model came "
    "to be; untied ones are two",
    roles=["build_model"],
    not_claimed="sharded models",
    source="NVIDIA-NeMo/Automodel PR#2511: the configuration said tied, the tensors were not; "
    "to_empty after a construction on meta unties",
)
@PATHS
def test_same_memory(stack, path, device, check):
    embedding, head = tables(CONSTRUCTIONS[path](stack, device, tied=True))
    check("one Parameter", head is embedding, equal=True, because="two would be updated apart")
    check("one memory", head.data_ptr() == embedding.data_ptr(), equal=True, because="as tied")
    embedding, head = tables(CONSTRUCTIONS[path](stack, device, tied=False))
    check("one memory although untied", head.data_ptr() == embedding.data_ptr(), equal=False,
          because="an untied head is a table of its own")  # fmt: skip


@gate(
    claim="a tied model counts its table once, in its parameters and in its optimizer groups",
    roles=["build_model", "param_groups"],
    not_claimed="the size of a checkpoint",
    source="meta-pytorch/torchtune#616: a construction on meta undid the tie",
)
@PATHS
def test_counted_once(stack, path, device, check):
    model = CONSTRUCTIONS[path](stack, device, tied=True)
    want = sum(p.numel() for p in probes.REFERENCE.build_model(model.config, stack).parameters())
    check("parameters", sum(p.numel() for p in model.parameters()), equal=want,
          because="one table of V * D")  # fmt: skip
    grouped = [p for group in stack.param_groups(model, 0.1) for p in group["params"]]
    check("parameters in the groups", sum(p.numel() for p in grouped), equal=want,
          because="a table in two groups would be updated twice")  # fmt: skip


@gate(
    claim="the gradient of the tied table is the sum of its two uses, which agree after an update",
    roles=["build_model", "accumulate", "optimizer_step"],
    not_claimed="sharded models",
    source="verl-project/verl PR#7835: the embedding received the half of its input only",
)
def test_gradient_is_the_sum(stack, rng, device, check):
    tied = probes.built(stack, "decoder", device, rng)
    untied = probes.REFERENCE.build_model(
        replace(tied.config, tied_head=False), probes.REFERENCE
    ).to(device, toys.working_dtype(stack))
    state = {name: tensor.detach().clone() for name, tensor in tied.state_dict().items()}
    untied.load_state_dict({**state, "lm_head.weight": state["embed_tokens.weight"].clone()})
    window = probes.labelled_window(rng, torch.zeros(2, 16, dtype=torch.int32)).to(device)
    probes.REFERENCE.accumulate(untied, window, None)
    stack.accumulate(tied, window, None)
    halves = [p.grad for p in tables(untied)]
    for name, half in zip(("input", "output"), halves, strict=True):
        share = half.norm() / (halves[0] + halves[1]).norm()
        check(f"share of the {name} in the gradient", share, within=(0.05, 20.0),
              because="both must matter for the sum to say something")  # fmt: skip
    error = relative_error(tied.embed_tokens.weight.grad, halves[0] + halves[1])
    check("relative error of the sum", error, at_most=toys.rounding(halves[0].dtype),
          because="the same sums in another order")  # fmt: skip
    stack.optimizer_step(stack.param_groups(tied, 0.1), {}, 1e-2, (0.9, 0.95), 1e-8)
    embedding, head = (p.detach() for p in tables(tied))
    check("difference of the tables after an update", (embedding - head).abs().max(), equal=0.0,
          because="one table")  # fmt: skip
    moved = (embedding - state["embed_tokens.weight"]).abs().max()
    check("largest move of the table", moved, within=(1e-3, 2e-2),
          because="one Adam step of 1e-2, not two")  # fmt: skip


@gate(
    claim="a state taken after an update, with or without the head, brings both tables back",
    roles=["build_model", "accumulate", "optimizer_step"],
    not_claimed="files, sharding, optimizer state",
    source="NVIDIA-NeMo/Automodel#2571: the head was left out of the state and had drifted",
)
@pytest.mark.parametrize("head", ["with", "without"])
def test_state(stack, head, rng, device, check):
    model = probes.built(stack, "decoder", device, rng)
    window = probes.labelled_window(rng, torch.zeros(2, 16, dtype=torch.int32)).to(device)
    stack.accumulate(model, window, None)
    stack.optimizer_step(stack.param_groups(model, 0.1), {}, 1e-2, (0.9, 0.95), 1e-8)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if head == "without":
        state.pop("lm_head.weight", None)
    fresh = built(stack, device, tied=True).to(toys.working_dtype(stack))
    fresh.load_state_dict(state, strict=False)
    for name, got, want in zip(("embedding", "head"), tables(fresh), tables(model), strict=True):
        check(f"change of the {name}", (got - want).detach().abs().max(), equal=0.0,
              because="a state is what it was taken from")  # fmt: skip
