"""M4. The whole model on trial beside the reference: same weights, same batch, at any rung."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from gates import ladder, parity, probes, twins
from gates.m4_parity_forward import OPERATORS
from harness import gate
from reference.ledger.parameters import parameter_count

COMPUTE = {"float32": None, "bfloat16": torch.bfloat16}
NUM_TOKENS = 64
# Weights and gradients: of the oracle 16 bytes a parameter, of the reference and of what is on
# trial 8 each.
BYTES_PER_PARAMETER = 32
BUDGET_BYTES = {"cpu": 5 * 2**30}
BUDGET_OF_AN_ACCELERATOR_BYTES = 24 * 2**30
KEPT = {}  # the outcomes of the last case


def config_of(rung, device):
    """The rung's model at its full depth where that fits, else one layer of its true width."""
    full = ladder.config(rung)
    needed_bytes = BYTES_PER_PARAMETER * parameter_count(full).total
    fits = needed_bytes <= BUDGET_BYTES.get(device.type, BUDGET_OF_AN_ACCELERATOR_BYTES)
    return full if fits else ladder.one_layer(rung)


def batch_of(config, layout, rng):
    """Some rows: packed, or whole and as far from position 0 as the model goes."""
    num_rows = max(2, 256 // config.model_width)
    ids_BT = torch.randint(config.vocabulary_size, (num_rows, NUM_TOKENS), generator=rng)
    return twins.batch(ids_BT, layout, min(config.max_positions, 4096) - NUM_TOKENS)


def outcome(stack, config, layout, seed, device, dtype=torch.float32):
    """Forward and backward of the stack's model with the weights and the batch of `seed`."""
    rng = torch.Generator().manual_seed(seed)
    model = stack.build_model(config, stack).to(device, dtype)
    twins.draw(model, rng, torch.bfloat16)
    batch = batch_of(config, layout, rng).to(device)
    group = 1 if config.vocabulary_size <= 1024 else 8
    found = parity.of_stack(stack, model, batch, gradients=True, group=group)
    num_parameters = sum(p.numel() for p in model.parameters())
    shape = f"{len(model.layers)} layers of width {config.model_width}, {num_parameters} parameters"
    del model
    gc.collect()  # a model is in a cycle with its hooks
    return found, shape


def reference_outcomes(config, layout, seed, device):
    """(oracle in float64 on the CPU, reference on the device): the same whatever is on trial."""
    key = config, layout, seed, device
    if key not in KEPT:
        KEPT.clear()  # first: with those of the case before they would not fit
        exact = replace(config, compute_dtype=None)
        oracle, _ = outcome(probes.REFERENCE, exact, layout, seed, "cpu", torch.float64)
        for name, gradient in oracle.gradients.items():
            oracle.gradients[name] = gradient.float()  # half the memory; an error of 3e-8
        KEPT[key] = oracle, outcome(probes.REFERENCE, config, layout, seed, device)[0]
    return KEPT[key]


@gate(
    claim="with the same weights and batch the loss is within 1e-3 of the oracle's, and the errors "
    "of hidden states, logits and gradients are at most 2 (gradients 2.7) times the reference's",
    roles=["build_model", *OPERATORS],
    not_claimed="the full depth of a rung where the measurement `shape` says one layer",
    source="the reference in float64 on the CPU, and in the same dtype on the same device",
)
@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("compute", COMPUTE)
def test_model(stack, compute, layout, rung, rng, device, check):
    config = replace(config_of(rung, device), compute_dtype=COMPUTE[compute])
    seed = rng.initial_seed()
    oracle, plain = reference_outcomes(config, layout, seed, device)
    got, shape = outcome(stack, config, layout, seed, device)
    full = config.num_layers == ladder.config(rung).num_layers
    want = f"{config.num_layers} layers of width {config.model_width}, " + (
        f"{parameter_count(config).total} parameters"
    )
    check("shape", shape, equal=want, because=f"rung {rung}: " + ("the full depth fits" if full
          else "one layer of the true width, since the full depth does not fit"))  # fmt: skip
    # The reference rounds seldom: transformers' own operators have 1.5 times its error in bfloat16.
    parity.check_ratios(check, got, plain, oracle, k=2.0, whose="the reference")
    if compute == "float32":
        parity.check_gradients(check, got.gradients, oracle.gradients, at_most=1e-4,
                               because="the sums of a deep or wide model")  # fmt: skip
