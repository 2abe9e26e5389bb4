"""M6. One update means the same on every number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace

from gates import distributed, rank_programs, toys
from harness import gate
from harness.compare import relative_error, worst_relative
from reference.schedule import Schedule
from reference.update import UpdateSettings

SOURCE = "the objective: sum of nll over all targets of the window on all ranks / their number"
SUMMATION = "the same sums in another order; a wrong denominator is off by tens of percent"
# Targets of each rank's four rows of 16 tokens. Ranks with equal counts would hide a wrong
# denominator: the second has 1 where the first has 27, the fourth a third of the third.
COUNTS = ((16, 4, 0, 7), (1, 0, 0, 0), (14, 15, 14, 15), (5, 4, 5, 5))
SAME = "every rank holds the same result, bit for bit"


def gradients(result):
    return toys.flat(result.tensors)


@gate(
    claim="the ranks' gradient is that of the token mean over all of them, on each of them",
    roles=["distribute", "accumulate"],
    not_claimed="low precision, speed, different numbers of microbatches on different ranks",
    source=SOURCE,
)
def test_gradient(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    counts = COUNTS[:world_size]
    without = [*counts[: world_size - 1], (0, 0, 0, 0)] if world_size > 1 else [(0, 3, 0, 0)]
    cases = {
        "unequal counts": distributed.ragged_shares(rng, counts),
        "four microbatches": distributed.ragged_shares(rng, counts, num_microbatches=4),
        "a rank without targets": distributed.ragged_shares(rng, without, num_microbatches=2),
        "no targets": distributed.ragged_shares(rng, [(0, 0)] * world_size, num_microbatches=2),
        "counts again": distributed.ragged_shares(rng, counts[::-1], num_microbatches=2),
    }
    start = distributed.start_of(model)
    results = ranks.run(rank_programs.accumulated, start, cases, world_size=world_size)
    for case, shares in cases.items():
        window, found = distributed.together(shares), [result[case] for result in results]
        _check_sums(check, case, window, found)
        check(f"spread of the ranks' gradients: {case}", distributed.spread(found, gradients),
              equal=0.0, because=SAME)  # fmt: skip
        if window.num_targets == 0:
            check(f"largest gradient: {case}", gradients(found[0]).abs().max(), equal=0.0,
                  because="the gradient of an empty sum, agreed by all ranks")  # fmt: skip
            continue
        loss, want = toys.token_mean(model, window)
        bound = toys.rounding(toys.working_dtype(stack))
        error, norm = worst_relative(found[0].tensors, want), gradients(found[0]).norm()
        check(f"relative gradient error: {case}", error, at_most=bound, because=SUMMATION)
        check(
            f"gradient norm / that of the token mean: {case}",
            norm / toys.flat(want).norm(),
            within=(1 - bound, 1 + bound),
            because="Adam hides a scale; the norm, on which the clip acts, does not",
        )
        check(
            f"relative error of the loss sum: {case}",
            abs(found[0].nll_sum / window.num_targets / loss - 1),
            at_most=min(max(bound, 1e-6), 1e-5),
            because="a sum that may be kept in float32 (eps 1.2e-7) but not narrower",
        )


def _check_sums(check, case, window, found):
    sums = [[result.num_targets, result.num_tokens] for result in found]
    wanted = [[window.num_targets, window.num_tokens]] * len(found)
    check(f"targets and tokens on each rank: {case}", sums, equal=wanted,
          because="sums over all ranks, known to each of them")  # fmt: skip
    losses = sorted({repr(result.nll_sum) for result in found})
    check(f"different loss sums: {case}", len(losses), equal=1, because=SAME)


@gate(
    claim="ranks with 3 and 1 targets and loss sums 6 and 4 step by 2.5, not by 3, and log 2.5",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="anything beyond these numbers; Adam's own step, which epsilon outweighs here",
    source="(6 + 4) / (3 + 1) = 2.5; the mean of the ranks' means 6/3 and 4/1 is 3: "
    "huggingface/transformers#34242",
)
def test_hand_example(stack, ranks, world_size, check):
    rows = [toys.row([0, 0, 0, 1], num_targets=3), toys.row([1, 0, 0, 0], num_targets=1)]
    empty = toys.rows(toys.row([0, 1, 0, 1], num_targets=0))
    shares = [toys.rows(*rows)] if world_size == 1 else [toys.rows(row) for row in rows]
    shares += [empty] * (world_size - len(shares))
    start = distributed.start_of(toys.LinearLoss([[2.0], [4.0]], start_D=[1.0]))
    settings = toys.plain_descent(max_norm=100.0)
    results = ranks.run(rank_programs.updated, start, [shares], settings, world_size=world_size)
    near = (2.5 * (1 - 1e-6), 2.5 * (1 + 1e-6))
    rounding = "2.5 but for a division by 3 ranks, and AdamW's epsilon, in float32"
    for result in results:
        record = result.records[0]
        check("loss", record.loss_nats, equal=2.5, because="exact: 10 / 4", unit="nats per token")
        check("gradient norm", record.grad_norm, within=near, because=rounding)
        step = 1 - float(result.parameters["lm_head.weight"])
        check("step", step, within=near, because=rounding)


@gate(
    claim="five updates leave the same bits on all ranks, and the parameters of one process",
    roles=["distribute", "accumulate", "clip_grad_norm", "param_groups", "optimizer_step",
           "update_window"],
    not_claimed="longer runs (M3); ranks that do not start through distribute",
    source="facebookresearch/detr#544: seeds may differ before distribute, values not after it",
)  # fmt: skip
def test_five_updates(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    settings = UpdateSettings(Schedule(1e-2, 1000, 100), max_norm=0.3)
    counts = COUNTS[:world_size]
    windows = [distributed.ragged_shares(rng, counts, num_microbatches=2) for _ in range(5)]
    want = distributed.single_process(model, windows, settings)
    start = distributed.start_of(model, strangers=True)
    results = ranks.run(rank_programs.updated, start, windows, settings, world_size=world_size)
    bound = toys.rounding(toys.working_dtype(stack))
    for update in range(5):
        digests = {result.digests[update] for result in results}
        check("different parameters after an update", len(digests), equal=1, because=SAME)
        told = {repr(result.records[update]) for result in results}
        check("different records of an update", len(told), equal=1, because=SAME)
        got, wanted = results[0].records[update], want.records[update]
        for name in ("loss_nats", "grad_norm"):
            error = abs(getattr(got, name) / getattr(wanted, name) - 1)
            check(
                f"relative error of {name}",
                error,
                at_most=max(bound, 1e-5),
                because="float32 sums at least; a mean of the ranks' means is off by percent",
            )
        rates = [got.learning_rate, wanted.learning_rate]
        check("learning rate, and that of one process", rates, equal=rates[1:] * 2,
              because="the same tokens give the same rate, whoever read them")  # fmt: skip
    check(
        "relative error of the parameters after five updates",
        relative_error(toys.flat(results[0].parameters), toys.flat(want.parameters)),
        at_most=10 * bound,
        because="rounding, which AdamW's early steps enlarge: they depend on the ratio of moments",
    )


@gate(
    claim="a loss that is not finite on one rank is skipped by all of them, or stops all of them",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="values that overflow in the loss scale (m6_precision)",
    source="ecmwf/WeatherGenerator PR#2718: the first rank decided from its own loss; the NaN of "
    "another one entered the reduction",
)
def test_not_finite(stack, ranks, world_size, check):
    good, bad = ([toys.rows(toys.row([token]))] for token in (0, 1))
    settings = {
        kind: replace(toys.plain_descent(max_norm=100.0), on_non_finite=kind)
        for kind in ("skip", "stop")
    }
    first, last = good * world_size, good * (world_size - 1) + bad
    start = distributed.start_of(toys.LinearLoss([[2.0], [math.nan]], start_D=[1.0]))
    windows = {"skip": [first, last, first], "stop": [first, last]}
    plans = {kind: (start, windows[kind], chosen) for kind, chosen in settings.items()}
    results = ranks.run(rank_programs.updated_by_each, plans, world_size=world_size)
    for result in results:
        skip, stop = result["skip"], result["stop"]
        reasons = [record.skipped is not None for record in skip.records]
        check("windows skipped", reasons, equal=[False, True, False],
              because="the second is NaN on the last rank, so on all")  # fmt: skip
        changed = skip.digests[0] != skip.digests[1]
        check("parameters changed by it", changed, equal=False,
              because="nothing of a skipped window is applied, on any rank")  # fmt: skip
        check(
            "weight after the third window",
            float(skip.parameters["lm_head.weight"]),
            within=(-3 - 1e-5, -3 + 1e-5),
            because="1 - 2 - 2: two windows with gradient 2, in float32",
        )
        check("stopped", bool(stop.stopped), equal=True, because="on_non_finite is stop")
        check(
            "updates before the stop", len(stop.records), equal=1, because="the NaN is in the 2nd"
        )
        check("parameters changed by the stop", stop.digests[0] != stop.digests[1], equal=False,
              because="it ends before anything of the window is applied")  # fmt: skip
