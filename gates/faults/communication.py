"""Wrong and right ways to count collectives and their bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness import benign, fault
from reference.ledger.communication import Communication

FILE = "m0_communication::"
HAND, ANY, HALF = (f"{FILE}test_{name}" for name in ("by_hand", "any_shape", "half_a_billion"))
SHARDED = [
    f"{HAND}[{case}]"
    for case in (
        "fsdp2, 2 ranks, 3 microbatches",
        "fsdp2, 3 ranks, bfloat16",
        "hybrid, 2 x 2 ranks",
    )
]
HYBRID = f"{HAND}[hybrid, 2 x 2 ranks]"
DDP = f"{HAND}[ddp, 4 ranks, 3 microbatches]"


def spoken_with(reference, change):
    """A training_communication whose parts are change(part, arguments), left out for None."""

    def training_communication(config, kind, mesh_shape, num_microbatches, *dtypes_and_buckets):
        got = reference.training_communication(
            config, kind, mesh_shape, num_microbatches, *dtypes_and_buckets
        )
        parts = (change(part, (config, kind, mesh_shape, num_microbatches)) for part in got.traffic)
        return Communication(tuple(part for part in parts if part is not None))

    return training_communication


def where(purpose, change):
    """The change of the parts of one purpose."""
    return lambda part, arguments: change(part, arguments) if part.purpose == purpose else part


def times(part, factor):
    return replace(part, count=part.count * factor, num_bytes=part.num_bytes * factor)


@fault(
    role="training_communication",
    caught_by=[DDP, f"{HALF}[8]"],
    seen_in="huggingface/accelerate PR#1726, KellerJordan/modded-nanogpt PR#31",
)
def counts_a_reduction_for_every_microbatch(reference):
    """Counts an all-reduce of all gradients for every microbatch."""
    return spoken_with(
        reference,
        lambda part, arguments: (
            times(part, arguments[3])
            if part.purpose == "gradients" and arguments[1] == "ddp"
            else part
        ),
    )


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 2 ranks, 3 microbatches]", HYBRID, ANY],
    seen_in="own",
)
def scatters_every_microbatch(reference):
    """Counts a reduce-scatter for every microbatch of a window."""
    return spoken_with(
        reference,
        lambda part, arguments: (
            times(part, arguments[3]) if part.kind == "reduce_scatter" else part
        ),
    )


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 2 ranks, 3 microbatches]", HYBRID, ANY],
    seen_in="own",
)
def gathers_once_a_window(reference):
    """Counts the gathers of one microbatch for the whole window."""

    def change(part, arguments):
        count, num_bytes = part.count // arguments[3], part.num_bytes // arguments[3]
        return replace(part, count=count, num_bytes=num_bytes)

    return spoken_with(reference, where("parameters", change))


@fault(role="training_communication", caught_by=[*SHARDED, ANY], seen_in="own")
def forgets_the_gather_of_the_backward(reference):
    """Counts the gathers of the forward alone, as if layers stayed whole until their backward."""

    def change(part, arguments):
        config, _, _, num_microbatches = arguments
        return replace(part, count=num_microbatches * (config.num_layers + 1))

    return spoken_with(reference, where("parameters", change))


@fault(role="training_communication", caught_by=[*SHARDED, ANY], seen_in="own")
def gathers_the_rest_twice(reference):
    """Counts a second gather of table and head, which stay whole between forward and backward."""

    def change(part, arguments):
        config, _, _, num_microbatches = arguments
        return replace(part, count=num_microbatches * 2 * (config.num_layers + 1))

    return spoken_with(reference, where("parameters", change))


@fault(role="training_communication", caught_by=SHARDED, seen_in="own")
def counts_the_gathered_whole(reference):
    """Counts what all ranks hold after a gather, not the shard that one hands in."""

    def change(part, arguments):
        return replace(part, num_bytes=part.num_bytes * part.group_size)

    return spoken_with(reference, where("parameters", change))


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 3 ranks, bfloat16]", ANY],
    seen_in="own",
)
def leaves_the_padding_out(reference):
    """Counts P elements scattered, although rows are dealt whole and the last ranks get filling."""

    def change(part, arguments):
        count = reference.parameter_count(arguments[0]).total
        return replace(part, num_bytes=4 * (count - count % part.group_size))

    return spoken_with(reference, where("gradients", change))


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 3 ranks, bfloat16]", ANY],
    seen_in="pytorch/pytorch#106395",
)
def reduces_in_the_dtype_of_compute(reference):
    """Counts gradients in the dtype in which parameters are gathered."""

    def training_communication(
        config, kind, mesh_shape, num_microbatches,
        parameter_dtype=torch.float32, reduce_dtype=torch.float32, *buckets,
    ):  # fmt: skip
        return reference.training_communication(
            config, kind, mesh_shape, num_microbatches, parameter_dtype, parameter_dtype, *buckets
        )

    return training_communication


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 3 ranks, bfloat16]", ANY],
    seen_in="own",
)
def gathers_in_float32(reference):
    """Takes the dtype of the gathers and counts four bytes."""

    def training_communication(config, kind, mesh_shape, k, parameter_dtype=None, *more):
        return reference.training_communication(config, kind, mesh_shape, k, torch.float32, *more)

    return training_communication


@fault(role="training_communication", caught_by=[HYBRID, ANY], seen_in="own")
def replicas_reduce_the_whole(reference):
    """Counts all gradients between replicas, although each rank reduces its shard alone."""
    return spoken_with(
        reference,
        where(
            "replicas",
            lambda part, arguments: replace(part, num_bytes=part.num_bytes * arguments[2][-1]),
        ),
    )


@fault(
    role="training_communication",
    caught_by=[HYBRID, f"{FILE}test_groups"],
    seen_in="mindspore-ai/hyper-parallel#279",
)
def sums_the_norm_over_replicas_too(reference):
    """Counts one more reduction of the norm, among the replicas: they would count twice."""

    def training_communication(*arguments):
        got = reference.training_communication(*arguments)
        replicas = [replace(part, count=1, num_bytes=4, purpose="replicas' norm")
                    for part in got.traffic if part.purpose == "replicas"]  # fmt: skip
        return Communication((*got.traffic, *replicas))

    return training_communication


@fault(role="training_communication", caught_by=[HAND, HALF, ANY], seen_in="own")
def forgets_the_targets(reference):
    """Leaves out the count of targets, without which no rank may begin its backward."""
    return spoken_with(reference, where("targets and tokens", lambda part, arguments: None))


@fault(
    role="training_communication",
    caught_by=[DDP, HALF, ANY],
    seen_in="mindspore-ai/hyper-parallel#279",
)
def counts_the_table_for_the_head_too(reference):
    """Counts a tied table twice in the gradients."""

    def change(part, arguments):
        config, kind, *_ = arguments
        tied = not reference.parameter_count(config).head
        extra = 4 * config.vocabulary_size * config.model_width
        return replace(part, num_bytes=part.num_bytes + extra * (tied and kind == "ddp"))

    return spoken_with(reference, where("gradients", change))


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[ddp, buckets of 256 and 512 bytes]", HALF],
    seen_in="own",
)
def one_bucket_for_all(reference):
    """Counts one all-reduce for all gradients, whatever the size of the buckets."""
    return spoken_with(
        reference,
        where(
            "gradients",
            lambda part, arguments: replace(part, count=1) if arguments[1] == "ddp" else part,
        ),
    )


@fault(
    role="training_communication",
    caught_by=[f"{HAND}[fsdp2, 1 rank]", f"{HAND}[hybrid, 2 x 1 ranks]"],
    seen_in="own",
)
def gathers_with_itself(reference):
    """Counts gathers and scatters of a rank that holds everything."""

    def training_communication(config, kind, mesh_shape, *more):
        got = reference.training_communication(config, kind, mesh_shape, *more)
        if kind == "ddp" or mesh_shape[-1] > 1:
            return got
        of_two = reference.training_communication(config, kind, (*mesh_shape[:-1], 2), *more)
        extra = [p for p in of_two.traffic if p.purpose in ("parameters", "gradients")]
        return Communication((*got.traffic, *extra))

    return training_communication


@fault(role="training_communication", caught_by=f"{FILE}test_groups", seen_in="own")
def takes_the_mesh_the_other_way_round(reference):
    """Shards over the first dimension and replicates over the second."""

    def training_communication(config, kind, mesh_shape, *more):
        return reference.training_communication(config, kind, mesh_shape[::-1], *more)

    return training_communication


@fault(role="training_communication", caught_by=f"{FILE}test_refused", seen_in="own")
def accepts_any_plan(reference):
    """Answers with nothing where the plan cannot be."""

    def training_communication(*arguments):
        try:
            return reference.training_communication(*arguments)
        except ValueError:
            return Communication(())

    return training_communication


@benign(
    role="training_communication",
    accepted_by=[HAND, f"{FILE}test_groups", HALF, ANY, f"{FILE}test_refused"],
    because="the same collectives in another order",
)
def other_order(reference):
    """Lists the collectives from the last to the first."""

    def training_communication(*arguments):
        return Communication(reference.training_communication(*arguments).traffic[::-1])

    return training_communication
