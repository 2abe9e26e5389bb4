"""M0. The ledger's hours, utilizations and tokens per second, none under another's name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from gates import shapes
from harness import gate
from reference.config import preset
from reference.ledger.flops import FlopsConvention
from reference.ledger.time import TokenCounts
from reference.loss import NO_TARGET
from reference.window import Microbatch

PLAN_FLOPS = 158_391_816_192_000_000_000
PLAN_FLOPS_FULL_ATTENTION = 213_957_955_584_000_000_000
SEVEN_BILLION_FLOPS = 456_600_000_000_000_000_000
H200_PEAK = 989e12  # dense bfloat16
NOT_MEASURED = "that the peak or the utilization is reached: both are inputs"
CAUSAL = FlopsConvention("parameters", 6)


@gate(
    claim="4.566e20 FLOPs at 120 TFLOP/s take 1056.94 card-hours, over 1, 8 and 64 cards",
    roles=["training_time"],
    not_claimed=NOT_MEASURED,
    source="C / (ranks x peak x u); the 120 is an assumption",
)
@pytest.mark.parametrize(("num_ranks", "hours"), [(1, 1056.94), (8, 132.12), (64, 16.51)])
def test_published_ranks(stack, check, num_ranks, hours):
    time = stack.training_time(SEVEN_BILLION_FLOPS, num_ranks, 120e12, 1.0)
    check("wall time", time.hours, within=(hours - 0.005, hours + 0.005), because="digits shown",
          unit="h")  # fmt: skip
    check("card-hours", time.rank_hours, within=(1056.935, 1056.945), because="digits shown",
          unit="h")  # fmt: skip
    check("seconds an hour", time.time_s / time.hours, within=(3600 - 1e-9, 3600 + 1e-9),
          because="units")  # fmt: skip


@gate(
    claim="the plan on 8 ranks of 312 TFLOP/s takes the published hours at each utilization",
    roles=["training_time"],
    not_claimed=NOT_MEASURED,
    source="C / (ranks x peak x u), C = 1.58e20 (6P) and 2.14e20 (with 12 L T D)",
)
@pytest.mark.parametrize(
    ("utilization", "hours", "hours_with_attention"),
    [(0.2, 88.14, 119.06), (0.3, 58.76, 79.37), (0.4, 44.07, 59.53), (0.5, 35.25, 47.62)],
)
def test_published_utilizations(stack, check, utilization, hours, hours_with_attention):
    for flops, want in (
        (PLAN_FLOPS, hours),
        (PLAN_FLOPS_FULL_ATTENTION, hours_with_attention),
    ):
        time = stack.training_time(flops, 8, 3.12e14, utilization)
        check(f"{flops:.3g} FLOPs", time.hours, within=(want - 0.005, want + 0.005),
              because="digits shown", unit="h")  # fmt: skip


@gate(
    claim="measured tokens per second are the published MFU under 6P + 6 L T N H",
    roles=["model_flops_utilization", "training_flops"],
    not_claimed="the measurement itself",
    source="measured on one card (the last on two), bfloat16 peak 989 TFLOP/s, T 4096",
)
@pytest.mark.parametrize(
    ("name", "tokens_per_s", "num_ranks", "percent"),
    [
        ("qwen2.5-0.5b", 117_164, 1, 41.4),
        ("qwen2.5-1.5b", 51_533, 1, 53.8),
        ("qwen2.5-7b", 12_402, 1, 60.4),
        ("qwen2.5-7b", 17_783, 2, 43.3),
    ],
)
def test_measured_utilization(stack, check, name, tokens_per_s, num_ranks, percent):
    flops = stack.training_flops(preset(name), tokens_per_s, 4096, CAUSAL)
    mfu = stack.model_flops_utilization(flops, 1.0, num_ranks, H200_PEAK)
    check("MFU", 100 * mfu.fraction, within=(percent - 0.05, percent + 0.05),
          because="digits shown", unit="%")  # fmt: skip
    check("counted", mfu.counted, equal="model FLOPs", because="said beside the number")
    check("convention", mfu.convention, equal=CAUSAL.text, because="said beside the number")


@gate(
    claim="recomputation raises HFU by what it computes, and never MFU",
    roles=["model_flops_utilization", "hardware_flops_utilization"],
    not_claimed=NOT_MEASURED,
    source="PaLM, appendix B: MFU counts what the model needs, HFU what the hardware did",
)
def test_recomputation(stack, check, for_all):
    @for_all(
        config=shapes.decoders(),
        again=st.tuples(st.booleans(), st.booleans()),
        max_examples=40,
    )
    def _(config, again):
        once = flops_of(config, FlopsConvention("products", 12))
        more = flops_of(config, FlopsConvention("products", 12, *again))
        peak = 2.0 * more.hardware_total  # over 3 s on 5 ranks: far below the peak
        mfu = stack.model_flops_utilization(more, 3.0, 5, peak)
        hfu = stack.hardware_flops_utilization(more, 3.0, 5, peak)
        plain = stack.model_flops_utilization(once, 3.0, 5, peak)
        rounding = 1e-12
        check("MFU with / without recomputation", mfu.fraction / plain.fraction,
              within=(1 - rounding, 1 + rounding), because="the model needs no more")  # fmt: skip
        ratio = more.hardware_total / more.model_total
        check("HFU / MFU over FLOPs done / needed", hfu.fraction / mfu.fraction / ratio,
              within=(1 - rounding, 1 + rounding), because="same time, same peak")  # fmt: skip
        check("HFU", hfu.fraction, within=((1 - rounding) / 30, (1 + rounding) / 30),
              because="1 / (2 x 3 s x 5 ranks)")  # fmt: skip
        check("MFU counts", mfu.counted, equal="model FLOPs", because="said beside the number")
        check("HFU counts", hfu.counted, equal="hardware FLOPs", because="said beside the number")
        check("convention", mfu.convention, equal=more.convention.text, because="kept with it")


@gate(
    claim="a utilization is at most 1: what would be more is refused, not clamped",
    roles=["model_flops_utilization", "hardware_flops_utilization"],
    not_claimed=NOT_MEASURED,
    source="pytorch/torchtitan PR#280: with mixed conventions more than 100 % came out",
)
def test_at_most_one(stack, check, for_all):
    @for_all(share=st.floats(1e-3, 3.0), num_ranks=st.integers(1, 64), max_examples=60)
    def _(share, num_ranks):
        again = FlopsConvention("products", 6, recompute_layers=True)
        flops = flops_of(preset("bytes-0.09m"), again)
        for name, role, total in (
            ("MFU", stack.model_flops_utilization, flops.model_total),
            ("HFU", stack.hardware_flops_utilization, flops.hardware_total),
        ):
            peak = total / num_ranks / share  # one second at `share` of it
            try:
                fraction = role(flops, 1.0, num_ranks, peak).fraction
            except ValueError:
                check(f"{name} refused at share", share, at_least=1 - 1e-12,
                      because="only what is more than the peak is refused")  # fmt: skip
                continue
            check(name, fraction, at_most=1.0, because="no device does more than its peak")
            check(f"{name} / share", fraction / share, within=(1 - 1e-12, 1 + 1e-12),
                  because="FLOPs / (time x ranks x peak)")  # fmt: skip


@gate(
    claim="a run that takes its planned time has the planned utilization",
    roles=["training_time", "model_flops_utilization"],
    not_claimed=NOT_MEASURED,
    source="both are the same equation",
)
def test_time_and_utilization_agree(stack, check, for_all):
    @for_all(
        utilization=st.floats(0.01, 1.0),
        num_ranks=st.integers(1, 512),
        peak_flops_per_s=st.floats(1e9, 1e16),
        max_examples=60,
    )
    def _(utilization, num_ranks, peak_flops_per_s):
        flops = flops_of(preset("plan-1.15b"), CAUSAL)
        time = stack.training_time(flops.model_total, num_ranks, peak_flops_per_s, utilization)
        done = time.time_s * num_ranks * peak_flops_per_s * utilization
        check("work in that time / FLOPs", done / flops.model_total, within=(1 - 1e-12, 1 + 1e-12),
              because="time x ranks x peak x utilization")  # fmt: skip
        slightly_longer = time.time_s * (1 + 1e-12)  # rounding must not pass the peak
        mfu = stack.model_flops_utilization(flops, slightly_longer, num_ranks, peak_flops_per_s)
        check("MFU / planned", mfu.fraction / utilization, within=(1 - 1e-11, 1 + 1e-11),
              because="float64 rounding")  # fmt: skip


@gate(
    claim="tokens per second do not depend on how a window is cut into microbatches",
    roles=["throughput"],
    not_claimed="that the time is the same too: it is an input here",
    source="karpathy/nanochat PR#175: one microbatch's tokens over the whole step's time",
)
def test_any_accumulation(stack, check, for_all):
    @for_all(
        counts=st.lists(st.integers(0, 999), min_size=1, max_size=12),
        cut=st.integers(0, 12),
        time_s=st.floats(1e-3, 1e3),
        max_examples=60,
    )
    def _(counts, cut, time_s):
        microbatches = [TokenCounts(1000 + n, 100 + n, n) for n in counts]
        whole = add_up(microbatches)
        parts = [add_up(part) for part in (microbatches[:cut], microbatches[cut:]) if part]
        for name, window in (("one by one", microbatches), ("cut", parts), ("whole", [whole])):
            found = stack.throughput(window, time_s)
            for kind in ("positions", "real", "supervised"):
                check(f"{kind}, {name}", getattr(found, f"{kind}_per_s") * time_s,
                      within=(getattr(whole, kind) - 1e-6, getattr(whole, kind) + 1e-6),
                      because="all tokens of the update over its time")  # fmt: skip


@gate(
    claim="positions, real tokens and supervised tokens are three numbers",
    roles=["token_counts", "throughput"],
    not_claimed="which of them a comparison should use",
    source="meta-pytorch/torchtune PR#1875: tokens per second counted padding; "
    "vllm-project/speculators PR#942: equal token counts, unequal supervised tokens",
)
def test_padded_and_real(stack, rng, check):
    real_lengths, T = [7, 16, 1, 11], 16
    labels_BT = torch.full((len(real_lengths), T), NO_TARGET)
    documents_BT = torch.full((len(real_lengths), T), -1, dtype=torch.int32)
    for index, length in enumerate(real_lengths):
        documents_BT[index, :length] = index
        labels_BT[index, : length - 1] = torch.randint(9, (length - 1,), generator=rng)
    supervised = sum(real_lengths) - len(real_lengths)
    labels_BT[1, :5] = NO_TARGET  # a prompt that is read and not trained on
    supervised -= 5
    input_ids_BT = torch.zeros_like(labels_BT)
    padded = Microbatch(input_ids_BT, labels_BT, input_ids_BT, documents_BT)
    counts = stack.token_counts(padded)
    check("positions", counts.positions, equal=len(real_lengths) * T, because="rows x row length")
    check("real", counts.real, equal=sum(real_lengths), because="tokens of documents")
    check("supervised", counts.supervised, equal=supervised, because="labels that are not -100")
    found = stack.throughput([counts, counts], 0.5)
    check("positions a second", found.positions_per_s, equal=4.0 * len(real_lengths) * T,
          because="two microbatches in half a second")  # fmt: skip
    check("real a second", found.real_per_s, equal=4.0 * sum(real_lengths), because="the same")
    check("supervised a second", found.supervised_per_s, equal=4.0 * supervised, because="the same")


def flops_of(config, convention):
    """The reference's FLOPs of 1000 tokens in rows of 8."""
    return shapes.REFERENCE.training_flops(config, 1000, 8, convention)


def add_up(microbatches):
    """One microbatch with the tokens of all."""
    return TokenCounts(
        sum(counts.positions for counts in microbatches),
        sum(counts.real for counts in microbatches),
        sum(counts.supervised for counts in microbatches),
    )
