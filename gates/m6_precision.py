"""M6. Low precision stays inside the model: what crosses ranks is float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gates import distributed, rank_programs, toys
from harness import gate, not_run
from harness.compare import relative_error
from reference.distribute import DistributionSettings
from reference.loss_scale import LossScaling

# 256 + 1 needs nine bits, bfloat16 has eight: the one is lost wherever the sum is kept in it.
LOW_BIT = [[256.0], [1.0]]
# Compute dtype; how far ranks may be beside one process; how far one process
# is from float64 at least.
# Sums over ranks round at 6e-8: as much as float32 compute itself, and nothing beside bfloat16.
COMPUTE = {
    "float32": (None, 3.0, 2e-8),
    "bfloat16": (torch.bfloat16, 1.5, 1e-3),
}


def power_of_two(world_size, first, other):
    """One row for each rank, `first` for the last rank, with 2 or 4 targets in all of them.

    Then the mean over targets divides without rounding, also in 16 bits.
    """
    if world_size == 1:
        return [toys.rows(other, first)]
    more = toys.row([int(other.input_ids[0, 0])] * 2) if world_size == 3 else other
    return [toys.rows(more), *[toys.rows(other)] * (world_size - 2), toys.rows(first)]


@gate(
    claim="gradients of a model that computes in bfloat16 are reduced in float32: 256 + 1 is 257",
    roles=["distribute", "accumulate"],
    not_claimed="rounding inside the model",
    source="pytorch/pytorch#106395, hiyouga/LlamaFactory#9769, deepspeedai/DeepSpeed#2768: "
    "stable on few ranks, unstable on many",
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_low_bit(stack, ranks, world_size, compute, check):
    dtype = torch.float32 if compute == "float32" else toys.require_bfloat16(stack)
    toy = toys.LinearLoss(LOW_BIT, start_D=[1.0], compute_dtype=dtype)
    settings = DistributionSettings(dtype if compute == "bfloat16" else None)
    start = distributed.start_of(toy, settings=settings)
    shares = power_of_two(world_size, toys.row([0]), toys.row([1]))
    results = ranks.run(rank_programs.accumulated, start, {"": shares}, world_size=world_size)
    num_targets = sum(share.num_targets for share in shares)
    want = (256 + num_targets - 1) / num_targets
    for result in results:
        check(
            f"gradient / (256 + ones) * targets: {compute}",
            float(result[""].tensors["lm_head.weight"]) / want,
            within=(1 - 1e-6, 1 + 1e-6),
            because="256 and the ones, in float32; bfloat16 leaves 256 and is off by 0.4 %",
        )


@gate(
    claim="float32 or bfloat16 compute over ranks is as far from float64 as in one process",
    roles=["distribute", "accumulate"],
    not_claimed="that either suffices to train",
    source="hiyouga/LlamaFactory#9769; the error of the plain reference in the same dtype must be "
    "accepted, and only that",
)
@pytest.mark.parametrize("compute", COMPUTE)
def test_error_ratio(stack, ranks, world_size, compute, rng, device, check):
    dtype, ratio, plain_error = COMPUTE[compute]
    if dtype is not None:
        toys.require_bfloat16(stack)
    config = replace(toys.TINY, initializer_std=0.2)
    model = stack.build_model(config, stack).to(device, torch.float32)
    counts = [(16, 4, 0, 7), (1, 0, 0, 0), (14, 15, 14, 15), (5, 4, 5, 5)][:world_size]
    shares = distributed.ragged_shares(rng, counts, num_microbatches=2)
    window = distributed.together(shares)
    _, want = toys.token_mean(model, window)
    plain = distributed.reference_twin(model, dtype)
    plain_stats = plain.stack.accumulate(plain, window.to(device), None)
    error = relative_error(toys.flat(toys.gradients(plain)), toys.flat(want))
    check(
        f"relative gradient error of one plain process: {compute}",
        error,
        at_least=plain_error,
        because="less than this dtype makes of such a model was computed wider",
    )
    start = distributed.start_of(
        model, changes={"initializer_std": 0.2}, settings=DistributionSettings(dtype)
    )
    results = ranks.run(rank_programs.accumulated, start, {"": shares}, world_size=world_size)
    for result in results:
        got = result[""]
        check(
            f"relative gradient error / that of one plain process: {compute}",
            relative_error(toys.flat(got.tensors), toys.flat(want)) / error,
            at_most=ratio,
            because="the same roundings in the model, and a float32 sum over ranks in any order",
        )
        check(f"loss / that of one plain process: {compute}", got.nll_sum / plain_stats.nll_sum,
              within=(1 - 2e-4, 1 + 2e-4), because="float32 logits; 16 bits: 2e-3")  # fmt: skip


@gate(
    claim="one loss scale over all ranks: an overflow on one of them skips the window on all, the "
    "scale falls once a window and grows once, and skipped updates are counted apart",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="the scale's rules themselves (m2_loss_scale)",
    source="torch.amp.GradScaler, once a window; the flag of an overflow is the OR over ranks",
)
def test_float16_scale(stack, ranks, world_size, check):
    if torch.float16 not in stack.dtypes:
        not_run("What is on trial declares no float16 on this device (DTYPES).")
    # The last rank's second window has a gradient of 6e4 times the scale; float16 ends at 65504.
    toy = toys.LinearLoss([[2.0], [6e4]], start_D=[1e-3], compute_dtype=torch.float16)
    start = distributed.start_of(toy, settings=DistributionSettings(torch.float16))
    good, bad = toys.row([0]), toys.row([1])
    windows = [power_of_two(world_size, good, good) for _ in range(5)]
    windows[1] = power_of_two(world_size, bad, good)
    scaling = LossScaling(initial=1024.0, interval=2)
    settings = replace(toys.plain_descent(rate=2.0**-10, max_norm=100.0), loss_scaling=scaling)
    results = ranks.run(rank_programs.updated, start, windows, settings, world_size=world_size)
    for result in results:
        scales = [record.loss_scale for record in result.records]
        check("loss scales of the windows", scales, equal=[1024.0, 1024.0, 512.0, 512.0, 1024.0],
              because="halved after the overflow, doubled after two finite updates")  # fmt: skip
        skipped = [record.skipped is not None for record in result.records]
        check("windows skipped", skipped, equal=[False, True, False, False, False],
              because="the gradient overflowed on one rank, so on all")  # fmt: skip
        steps = [record.counters.optimizer_steps for record in result.records]
        check("optimizer steps", steps, equal=[1, 1, 2, 3, 4], because="a skipped one is none")
        for record in result.records:
            if record.skipped is None:
                check(
                    "gradient norm without the scale",
                    record.grad_norm,
                    within=(2 - 1e-6, 2 + 1e-6),
                    because="exact, but for an average of 3 ranks",
                )
        step = float(1e-3 - result.parameters["lm_head.weight"]) * 2**10
        check("four steps of 2", step, within=(8 * (1 - 1e-5), 8 * (1 + 1e-5)),
              because="at rate 2^-10, in float32")  # fmt: skip
