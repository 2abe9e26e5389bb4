"""M1. The model as a whole is the reference: hidden states, loss and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gates import probes, toys
from harness import gate
from harness.compare import relative_error, worst_relative

VARIANTS = {
    "decoder": ("decoder", {}),
    "decoder-untied": ("decoder", {"tied_head": False, "qkv_bias": False, "norm_epsilon": 1e-2}),
    "decoder-no-groups": ("decoder", {"num_kv_heads": 8, "num_layers": 1}),
    "chargpt": ("chargpt", {"norm_epsilon": 1e-2}),
}


@gate(
    claim="with the same parameters the model has the reference's hidden states, loss, gradients",
    roles=["build_model", "rms_norm", "rope", "attention", "swiglu", "linear", "token_nll"],
    not_claimed="that the reference is right: the gates of its operators and its tests say that",
    source="the same formulas in float64 on the CPU; the reference agrees with transformers' Qwen2",
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(stack, variant, rng, device, check):
    family, changes = VARIANTS[variant]
    model = probes.built(stack, family, device, rng, **changes)
    documents_BT = probes.documents_of([[9, 7], [1, 15]])
    window = probes.labelled_window(rng, documents_BT)
    microbatch = window.to(device).microbatches[0]
    hidden = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    twin, on_cpu = toys.oracle(model), window.microbatches[0]
    want_hidden = twin(on_cpu.input_ids, on_cpu.positions, on_cpu.documents)
    bound = 64 * toys.rounding(hidden.dtype)
    because = "three layers of sums in another order"
    check("shape", list(hidden.shape), equal=list(want_hidden.shape), because="[B, T, D]")
    check("relative error of the hidden states", relative_error(hidden, want_hidden),
          at_most=bound, because=because)  # fmt: skip
    nll_sum, num_targets = stack.token_nll(
        hidden.flatten(0, 1), model.lm_head.weight, microbatch.labels.flatten()
    )
    (nll_sum / num_targets).backward()
    want_loss, want_gradients = toys.token_mean(model, window)
    loss = float(nll_sum.detach() / num_targets)
    check("relative error of the loss", abs(loss / want_loss - 1), at_most=bound, because=because)
    gradients = toys.gradients(model)
    check("parameters", sorted(gradients), equal=sorted(want_gradients),
          because="Hugging Face's names, which checkpoints are written in")  # fmt: skip
    negligible = probes.without_gradient(family)
    worst = worst_relative(
        {n: g for n, g in gradients.items() if not n.endswith(negligible)},
        {n: g for n, g in want_gradients.items() if not n.endswith(negligible)},
    )
    check("worst relative error of a gradient", worst, at_most=bound, because=because)


@gate(
    claim="computing in bfloat16 keeps the loss within 1e-3 and the gradient within 5 %",
    roles=["build_model", "rms_norm", "rope", "attention", "swiglu", "linear", "token_nll"],
    not_claimed="that training in bfloat16 converges alike",
    source="the end-to-end bound of design section 6",
)
@pytest.mark.parametrize("family", probes.FAMILIES)
def test_bfloat16(stack, family, rng, device, check):
    config = replace(probes.FAMILIES[family], compute_dtype=toys.require_bfloat16(stack))
    model = stack.build_model(config, stack).to(device)
    window = probes.labelled_window(rng, torch.zeros(8, 32, dtype=torch.int32))
    stack.accumulate(model, window.to(device), None)
    microbatch = window.to(device).microbatches[0]
    hidden = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    with torch.no_grad():
        nll_sum, num_targets = stack.token_nll(
            hidden.flatten(0, 1), model.lm_head.weight, microbatch.labels.flatten()
        )
    want_loss, want_gradients = toys.token_mean(model, window)
    check("relative error of the loss", abs(float(nll_sum / num_targets) / want_loss - 1),
          at_most=1e-3, because="256 targets average the roundings of 2^-9")  # fmt: skip
    error = relative_error(toys.flat(toys.gradients(model)), toys.flat(want_gradients))
    check("relative error of the gradient", error, at_most=5e-2,
          because="some roundings of 2^-9 in a row; 1 % is usual")  # fmt: skip
