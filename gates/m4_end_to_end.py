"""M4. The whole model on trial beside the reference: same weights, same batch, at any rung."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gates import ladder, outcomes, parity, probes, toys, twins
from gates.m4_parity_forward import OPERATORS, built
from gates.outcomes import Outcome
from harness import gate
from reference.hf.weights import EMBEDDING, HEAD
from reference.ledger.parameters import parameter_count

NUM_TOKENS = 64
# The drawn weights 2, the oracle's gradients 4; of what is on trial weights and gradients 8 and
# bfloat16 copies 2. (While the oracle was made: 2, and weights in float64 and gradients 12.)
BYTES_PER_PARAMETER = 16
BUDGET_BYTES = {"cpu": 5 * 2**30}
BUDGET_OF_AN_ACCELERATOR_BYTES = 24 * 2**30


@dataclass(frozen=True)
class Known:
    """What is the same whatever is on trial; the gradients of `plain` are settled."""

    weights: dict[str, Tensor]
    oracle: Outcome
    plain: Outcome


KEPT: dict[tuple[object, ...], Known] = {}  # of the last case


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


def weights_of(config, seed, device):
    """Weights in bfloat16, which holds them exactly, drawn where they are used."""
    rng = torch.Generator(device).manual_seed(seed)
    weights = twins.random_weights(config, rng, torch.bfloat16)
    narrow = {name: weight.bfloat16() for name, weight in weights.items()}
    return narrow | ({HEAD: narrow[EMBEDDING]} if config.tied_head else {})


def known(config, layout, batch, seed, device):
    """Weights, oracle and plain outcome of a case; made once, and kept until the next case."""
    key = config, layout, seed, device
    if key not in KEPT:
        KEPT.clear()  # first: with those of the case before they would not fit
        weights = weights_of(config, seed, device)
        exact = replace(config, compute_dtype=None)
        place = outcomes.place(device)
        oracle = outcome(probes.REFERENCE, exact, weights, batch, place, torch.float64)[0]
        plain = outcome(probes.REFERENCE, config, weights, batch, device)[0]
        KEPT[key] = Known(weights, oracle, parity.settled(plain, oracle))
    return KEPT[key]


def outcome(stack, config, weights, batch, device, dtype=torch.float32):
    """Forward and backward of the stack's model on `device`, and the model's shape in words."""
    model = built(stack, config, weights, device).to(dtype)
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32  # half the memory, and an error of 3e-8
    num_parameters = sum(p.numel() for p in model.parameters())
    shape = f"{len(model.layers)} layers of width {config.model_width}, {num_parameters} parameters"
    group = 1 if config.vocabulary_size <= 1024 else 8
    found = outcomes.of_stack(
        stack, model, batch.to(device), gradients=True, group=group, kept_on=outcomes.place(device)
    )
    del model
    gc.collect()  # a model is in a cycle with its hooks
    return found, shape


@gate(
    claim="with the same weights and batch the loss is within 1e-3 of the oracle's, and the errors "
    "of hidden states, logits and gradients are at most 2 (gradients 2.7) times the reference's",
    roles=["build_model", *OPERATORS],
    not_claimed="the full depth of a rung where the measurement `shape` says one layer",
    source="the reference in float64, on the device if it has that, else on the CPU; and the "
    "reference in the same dtype on the same device",
)
@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_model(stack, compute, layout, rung, rng, device, check):
    dtype = toys.require_bfloat16(stack) if compute == "bfloat16" else None
    config = replace(config_of(rung, device), compute_dtype=dtype)
    seed = rng.initial_seed()
    batch = batch_of(config, layout, rng)
    same = known(config, layout, batch, seed, device)
    got, shape = outcome(stack, config, same.weights, batch, device)
    got = parity.settled(got, same.oracle)
    full = config.num_layers == ladder.config(rung).num_layers
    want = f"{config.num_layers} layers of width {config.model_width}, " + (
        f"{parameter_count(config).total} parameters"
    )
    check("shape", shape, equal=want, because=f"rung {rung}: " + ("the full depth fits" if full
          else "one layer of the true width, since the full depth does not fit"))  # fmt: skip
    # The reference rounds seldom: transformers' own operators have 1.5 times its error in bfloat16.
    parity.check_ratios(check, got, same.plain, same.oracle, k=2.0, whose="the reference")
    if compute == "float32":
        parity.check_gradients(check, got, same.oracle, at_most=1e-4,
                               because="the sums of a deep or wide model")  # fmt: skip
