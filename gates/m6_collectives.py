"""M6. What ranks say to each other: as much as the ledger says, the same on each of them."""

from __future__ import annotations

import torch

from gates import distributed, rank_programs, toys
from harness import gate
from reference.distribute import DistributionSettings

COUNTS = ((16, 4, 3), (1, 0, 2), (0, 3, 0), (5, 4, 1))
NUM_MICROBATCHES = 3
# A wrapper may be slow to start, on a machine that is busy. A rank that waits, waits for ever.
DEADLINE_S = 40


def float32_model(stack, device):
    return stack.build_model(toys.TINY, stack).to(device, torch.float32)


@gate(
    claim="an update reduces each gradient once a window, in float32; where `distribute` declares "
    "its `communication`, collectives and bytes are exactly those of the ledger",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window", "training_communication"],
    not_claimed="what crosses the wire; the first update, in which DDP makes its buckets",
    source="huggingface/accelerate PR#1726, KellerJordan/modded-nanogpt PR#31: a backward alone in "
    "no_sync reduces every microbatch",
)
def test_traffic(stack, ranks, world_size, rng, device, check):
    model = float32_model(stack, device)
    shares = distributed.ragged_shares(rng, COUNTS[:world_size], NUM_MICROBATCHES)
    meshes = {"one dimension": (world_size,)}
    if world_size > 1:
        meshes["two dimensions"] = (world_size // 2, 2) if world_size != 3 else (1, 3)
    starts = {name: distributed.start_of(model, mesh_shape=mesh) for name, mesh in meshes.items()}
    settings = DistributionSettings(torch.bfloat16)
    if torch.bfloat16 in stack.dtypes:
        starts["bfloat16"] = distributed.start_of(model, settings=settings)
    results = ranks.run(rank_programs.communicated, starts, shares, world_size=world_size)
    for name, start in starts.items():
        found = [result[name] for result in results]
        sequences = len({tuple(traffic.issued) for traffic in found})
        check(f"different sequences of collectives: {name}", sequences, equal=1,
              because="ranks wait for each other")  # fmt: skip
        _check_reductions(check, name, found[0], model, world_size)
        declared = getattr(stack.distribute, "communication", None)
        if declared is not None:
            _check_ledger(check, name, found[0], stack, start, world_size, declared)


def _check_ledger(check, name, traffic, stack, start, world_size, kind):
    mesh = start.mesh_shape or (world_size,)
    width = start.settings.compute_dtype or torch.float32
    if kind == "fsdp2" and len(mesh) == 2:
        kind = "hybrid"
    elif kind == "ddp":
        mesh = (world_size,)
    told = stack.training_communication(
        toys.TINY, kind, mesh, NUM_MICROBATCHES, width, torch.float32
    )
    for what, values, wanted in (
        ("collectives", traffic.counts, told.counts),
        ("bytes", traffic.num_bytes, told.num_bytes),
    ):
        check(f"{what} of an update by kind: {name}", _listed(values), equal=_listed(wanted),
              because=f"the ledger's formula for {kind}")  # fmt: skip


def _listed(by_kind):
    return [f"{kind} {by_kind[kind]}" for kind in sorted(by_kind)]


def _check_reductions(check, name, traffic, model, world_size):
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    kinds = ("all_reduce", "reduce_scatter", "reduce")
    reduced = sum(traffic.num_bytes.get(kind, 0) for kind in kinds)
    check(f"bytes that are reduced in an update / those of its gradients: {name}",
          reduced / gradient_bytes, within=(int(world_size > 1), 1.9),
          because="three microbatches reduce them once, in float32; the rest is counts, norms, "
          "padding, and shards that replicas reduce once more")  # fmt: skip


@gate(
    claim="a rank without targets issues the collectives of the others, in their order",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="different numbers of microbatches on different ranks",
    source="lightseekorg/TorchSpec#126: one rank skips a sample with too few targets, and the "
    "others wait for ever",
)
def test_every_rank_takes_part(stack, ranks, world_size, rng, device, check):
    model = float32_model(stack, device)
    some = distributed.ragged_shares(rng, COUNTS[:world_size], 2)
    lone = [(0, 0), (0, 0), (0, 0), (3, 1)][-world_size:]
    windows = [some, distributed.ragged_shares(rng, lone, 2), some]
    windows.insert(2, distributed.ragged_shares(rng, [(0, 0)] * world_size, 2))
    start = distributed.start_of(model)
    outcome = ranks.run(
        rank_programs.updated, start, windows, toys.plain_descent(), world_size=world_size,
        may_fail=True, timeout_s=DEADLINE_S,
    )  # fmt: skip
    distributed.check_ends(check, outcome, "nobody waits for a rank that has gone on")
    sequences = {tuple(end.collectives) for end in outcome.ends}
    check("different sequences of collectives", len(sequences), equal=1,
          because="no collective depends on the data of one rank")  # fmt: skip
    skipped = [record.skipped is not None for record in outcome.results[0].records]
    check("windows skipped", skipped, equal=[False, False, True, False],
          because="one rank's targets are enough; no target anywhere is a skip")  # fmt: skip


@gate(
    claim="no rank finishes an update in which another one was killed; the dead one is named",
    roles=["distribute", "accumulate"],
    not_claimed="that the run goes on without it",
    source="a gradient without the share of one rank is another gradient",
)
def test_killed_rank(stack, ranks, world_size, rng, device, check):
    start = distributed.start_of(float32_model(stack, device))
    shares = distributed.ragged_shares(rng, COUNTS[:world_size], 2)
    outcome = ranks.run(
        rank_programs.killed, start, shares, world_size=world_size, may_fail=True,
        timeout_s=DEADLINE_S,
    )  # fmt: skip
    last = world_size - 1
    check("what ended the ranks", outcome.failure and outcome.failure.kind, equal="died",
          because="signal 9, in a microbatch of the last rank")  # fmt: skip
    check("ranks that died", list(outcome.failure.ranks), equal=[last], because="no other")
    went_on = [end.index for end in outcome.ends if end.how == "finished"]
    check("ranks that finished the update", went_on, equal=[],
          because="they wait for its gradient, and are told")  # fmt: skip
