"""M0. The ledger's collectives: by hand, by published counts, and for any shape and mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from gates import shapes
from harness import gate
from reference.config import DecoderConfig, preset

# 40 in the table, 136 in each of two layers, 4 in the last norm: P = 316. With two shards a rank
# holds 20, 68 and 2 of them; with three, rows of 4 and 2 make shares of 2 and 1: 16, 60 and 2.
SMALL = DecoderConfig(
    vocabulary_size=10,
    model_width=4,
    feed_forward_width=6,
    num_layers=2,
    num_query_heads=2,
    num_kv_heads=1,
    head_width=2,
    max_positions=8,
    qkv_bias=True,
)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
NOT_MEASURED = "that an implementation does so (m6_collectives), and what crosses a wire"
BY_HAND = "by hand, from the shapes"

CASES = {
    "ddp, 4 ranks, 3 microbatches": (
        ("ddp", (4,), 3, FLOAT32, FLOAT32),
        {"all_reduce": (2, 316 * 4 + 16), "all_gather": (1, 8)},
    ),
    "ddp, buckets of 256 and 512 bytes": (
        ("ddp", (2,), 1, FLOAT32, FLOAT32, (256, 512)),
        {"all_reduce": (4, 336 + 544 + 384 + 16), "all_gather": (1, 8)},
    ),
    "fsdp2, 2 ranks, 3 microbatches": (
        ("fsdp2", (2,), 3, FLOAT32, FLOAT32),
        {
            "all_gather": (3 * 5 + 1, 3 * (2 * 136 + 22) * 4 + 8),
            "reduce_scatter": (3, 2 * 158 * 4),
            "all_reduce": (2, 16 + 4),
        },
    ),
    "fsdp2, 3 ranks, bfloat16": (
        ("fsdp2", (3,), 1, BFLOAT16, FLOAT32),
        {
            "all_gather": (5 + 1, (2 * 120 + 18) * 2 + 8),
            "reduce_scatter": (3, 3 * 138 * 4),
            "all_reduce": (2, 16 + 4),
        },
    ),
    "fsdp2, 2 ranks, reduced in bfloat16": (
        ("fsdp2", (2,), 1, BFLOAT16, BFLOAT16),
        {
            "all_gather": (5 + 1, (2 * 136 + 22) * 2 + 8),
            "reduce_scatter": (3, 2 * 158 * 2),
            "all_reduce": (2, 16 + 4),
        },
    ),
    "fsdp2, 1 rank": (
        ("fsdp2", (1,), 2, FLOAT32, FLOAT32),
        {"all_gather": (1, 8), "all_reduce": (2, 16 + 4)},
    ),
    "hybrid, 2 x 2 ranks": (
        ("hybrid", (2, 2), 3, FLOAT32, FLOAT32),
        {
            "all_gather": (3 * 5 + 1, 3 * (2 * 136 + 22) * 4 + 8),
            "reduce_scatter": (3, 2 * 158 * 4),
            "all_reduce": (2 + 3, 16 + 4 + 158 * 4),
        },
    ),
    "hybrid, 2 x 1 ranks": (
        ("hybrid", (2, 1), 3, FLOAT32, FLOAT32),
        {"all_gather": (1, 8), "all_reduce": (2 + 3, 16 + 4 + 316 * 4)},
    ),
}


@gate(
    claim="collectives and bytes of one update of a small decoder, by kind, are those of the hand",
    roles=["training_communication"],
    not_claimed=NOT_MEASURED,
    source="torch's documentation of DistributedDataParallel and fully_shard",
)
@pytest.mark.parametrize("case", CASES)
def test_by_hand(stack, check, case):
    arguments, want = CASES[case]
    got = stack.training_communication(SMALL, *arguments)
    found = {kind: (number, got.num_bytes[kind]) for kind, number in got.counts.items()}
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        number, num_bytes = found.get(kind, (0, 0))
        wanted_number, wanted_bytes = want.get(kind, (0, 0))
        check(f"{kind}: number", number, equal=wanted_number, because=BY_HAND)
        check(f"{kind}: bytes", num_bytes, equal=wanted_bytes, because=BY_HAND, unit="B")


@gate(
    claim="who speaks with whom: shards in groups of the second dimension, replicas of the first",
    roles=["training_communication"],
    not_claimed=NOT_MEASURED,
    source="torch's documentation of fully_shard on a 2-D mesh",
)
def test_groups(stack, check):
    got = stack.training_communication(SMALL, "hybrid", (4, 2), 1)
    sizes = sorted((part.kind, part.group_size) for part in got.traffic)
    check(
        "kinds and group sizes on 4 x 2 ranks",
        [list(pair) for pair in sizes],
        equal=[["all_gather", 2], ["all_gather", 8], ["all_reduce", 2], ["all_reduce", 4],
               ["all_reduce", 8], ["reduce_scatter", 2]],
        because="parameters and gradients among 2, replicas among 4, counts and loss among all 8; "
        "the norm over the shards alone, or replicas count twice",
    )  # fmt: skip


@gate(
    claim="the gradients of the 0.5B model are 1,976,131,072 bytes an update under DDP, whatever "
    "the microbatches",
    roles=["training_communication"],
    not_claimed=NOT_MEASURED,
    source="494,032,768 parameters of 4 bytes; huggingface/accelerate PR#1726: once a window",
)
@pytest.mark.parametrize("num_microbatches", [1, 8])
def test_half_a_billion(stack, check, num_microbatches):
    got = stack.training_communication(preset("qwen2.5-0.5b"), "ddp", (8,), num_microbatches)
    check("bytes of all-reduces", got.num_bytes["all_reduce"], equal=1_976_131_072 + 16,
          because="the published number of parameters, and two counts", unit="B")  # fmt: skip
    check("all-reduces", got.counts["all_reduce"], within=(34, 78),
          because="the table is one; the rest is in buckets of 25 to 43 MiB, 25 and a matrix of 17 "
          "MiB; and one of two counts")  # fmt: skip


def row_elements(config):
    """Elements of one row of every parameter: all dimensions but the first."""
    with torch.device("meta"):
        model = shapes.REFERENCE.build_model(config, shapes.REFERENCE)
    return sum(parameter[0].numel() for parameter in model.parameters())


@gate(
    claim="for any shape: gathers grow with the microbatches and reductions do not; padding adds "
    "less than a row a parameter and rank; narrow gathers are half of wide ones",
    roles=["training_communication"],
    not_claimed=NOT_MEASURED,
    source="the formulae, as relations between calls",
)
def test_any_shape(stack, check, for_all):
    @for_all(
        config=st.one_of(shapes.decoders(), shapes.chargpts()),
        num_shards=st.integers(2, 5),
        num_microbatches=st.integers(2, 6),
        max_examples=15,
    )
    def _(config, num_shards, num_microbatches):
        count = shapes.REFERENCE.parameter_count(config).total
        mesh, num_units = (num_shards,), config.num_layers + 1

        def of(kind="fsdp2", mesh=mesh, num_microbatches=num_microbatches, dtype=FLOAT32):
            return stack.training_communication(
                config, kind, mesh, num_microbatches, dtype, FLOAT32
            )

        many, one = of(), of(num_microbatches=1)
        because = "an update reduces once; each microbatch gathers anew"
        check("reduce-scatters", many.counts["reduce_scatter"], equal=num_units, because=because)
        check(
            "gathers of a microbatch",
            (many.counts["all_gather"] - 1) / num_microbatches,
            equal=2 * config.num_layers + 1,
            because="layers in forward and backward, the rest in the forward alone",
        )
        check(
            "bytes gathered / by one microbatch",
            (many.num_bytes["all_gather"] - 8) / (one.num_bytes["all_gather"] - 8),
            equal=num_microbatches,
            because=because,
        )
        reduced = many.num_bytes["reduce_scatter"]
        check("bytes scattered", reduced, at_least=4 * count, because="every gradient is in it")
        check("padding", reduced - 4 * count, at_most=4 * (num_shards - 1) * row_elements(config),
              because="less than a row of each parameter for each rank", unit="B")  # fmt: skip
        narrow = of(dtype=BFLOAT16)
        check("bytes gathered in float32 / in bfloat16",
              (many.num_bytes["all_gather"] - 8) / (narrow.num_bytes["all_gather"] - 8),
              equal=2.0, because="4 and 2 bytes")  # fmt: skip
        check("bytes scattered with narrow gathers", narrow.num_bytes["reduce_scatter"],
              equal=reduced, because="gradients are reduced in float32 all the same")  # fmt: skip
        ddp = of("ddp").num_bytes["all_reduce"]
        check("bytes of DDP", ddp, equal=4 * count + 16, because="P gradients and two counts")
        both = of("hybrid", (3, num_shards))
        extra = both.num_bytes["all_reduce"] - many.num_bytes["all_reduce"]
        check("bytes between replicas", extra * num_shards, equal=reduced,
              because="each rank reduces its own shard with its replicas")  # fmt: skip


REFUSED = {
    "kind": (SMALL, "zero3", (2,), 1),
    "one dimension": (SMALL, "hybrid", (4,), 1),
    "two dimensions": (SMALL, "ddp", (2, 2), 1),
    "no rank": (SMALL, "fsdp2", (0,), 1),
    "no microbatch": (SMALL, "fsdp2", (2,), 0),
    "no config": (replace, "ddp", (2,), 1),
}


@gate(
    claim="a kind, a mesh or a number that cannot be is refused with a ValueError",
    roles=["training_communication"],
    not_claimed="the words",
    source="a plan that is silently wrong costs more than one that is refused",
)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(stack, check, case):
    try:
        stack.training_communication(*REFUSED[case])
        ended = "accepted"
    except ValueError:
        ended = "refused"
    check("outcome", ended, equal="refused", because="there is no such run")
