"""M6. Wrapping a model for many ranks leaves it the model that it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gates import distributed, rank_programs, toys
from harness import gate
from harness.compare import relative_error, worst_relative
from reference.distribute import DistributionSettings

SUMMATION = "the same sums in another order"
MESHES = {"1": [(1, 1)], "2": [(1, 2), (2, 1)], "3": [(1, 3), (3, 1)], "4": [(2, 2), (4, 1)]}
COUNTS = ((16, 4), (1, 0), (0, 3), (5, 4))


@gate(
    claim="a distributed model has the parameters that it had, under their names, a tied one once",
    roles=["distribute", "accumulate", "param_groups", "update_window"],
    not_claimed="checkpoints over ranks",
    source="verl-project/verl#7834, facebookresearch/lingua PR#75: sharding the embedding and the "
    "head apart unties them; facebookresearch/detr#544",
)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_parameters(stack, ranks, world_size, head, rng, device, check):
    model = toys.tiny_model(stack, device, tied_head=head == "tied")
    shares = distributed.ragged_shares(rng, COUNTS[:world_size])
    start = distributed.start_of(
        model,
        changes={"tied_head": head == "tied"},
        settings=DistributionSettings(checkpoint_activations=True),
        strangers=True,
    )
    results = ranks.run(rank_programs.looked_at, start, shares, world_size=world_size)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    for when in ("before", "after"):
        for result in results:
            look = result[when]
            check(f"names: {when}", sorted(look.shapes), equal=sorted(shapes),
                  because="those of the model, prefixes of the wrapper apart")  # fmt: skip
            check(f"shapes: {when}", [look.shapes[name] for name in sorted(shapes)],
                  equal=[shapes[name] for name in sorted(shapes)],
                  because="of the whole parameter, however it is sharded")  # fmt: skip
            check(f"head is embedding: {when}", look.is_tied, equal=head == "tied",
                  because="one parameter, also in an update")  # fmt: skip
            check(f"parameters in groups: {when}", look.num_in_groups, equal=len(shapes),
                  because="each is updated once")  # fmt: skip
        check(f"different values: {when}", len({r[when].digest for r in results}), equal=1,
              because="those of the first rank, on all of them")  # fmt: skip
    values = {name: start.values[name] for name in shapes}
    first = [result["before"].digest for result in results]
    check("digest of the values", first, equal=[distributed.digest(values)] * world_size,
          because="distribute moves values and does not change them")  # fmt: skip


@gate(
    claim="replicas of shards, on a mesh of two dimensions, have the gradient of the token mean",
    roles=["distribute", "accumulate", "clip_grad_norm", "update_window"],
    not_claimed="what is communicated (m6_collectives)",
    source="the objective does not know the mesh",
)
def test_hybrid_mesh(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    windows = [distributed.ragged_shares(rng, COUNTS[:world_size], 2) for _ in range(2)]
    settings = toys.plain_descent(max_norm=0.1)
    want = distributed.single_process(model, windows, settings)
    plans = {
        f"{shape[0]} x {shape[1]}": (
            distributed.start_of(model, mesh_shape=shape, strangers=True), windows, settings
        )
        for shape in MESHES[str(world_size)]
    }  # fmt: skip
    results = ranks.run(rank_programs.updated_by_each, plans, world_size=world_size)
    bound = toys.rounding(toys.working_dtype(stack))
    for mesh in plans:
        for update in (0, 1):
            digests = {result[mesh].digests[update] for result in results}
            check(f"different parameters: {mesh}", len(digests), equal=1,
                  because="replicas are equal, bit for bit")  # fmt: skip
            norm = results[0][mesh].records[update].grad_norm
            check(
                f"norm / that of one process: {mesh}",
                norm / want.records[update].grad_norm,
                within=(1 - max(bound, 1e-6), 1 + max(bound, 1e-6)),
                because="the same gradient; its norm may be in float32",
            )
        error = relative_error(toys.flat(results[0][mesh].parameters), toys.flat(want.parameters))
        check(f"relative error of the parameters: {mesh}", error, at_most=max(bound, 1e-6),
              because=SUMMATION)  # fmt: skip


@gate(
    claim="activations that are computed again are the same: the gradient is that without",
    roles=["distribute", "accumulate"],
    not_claimed="memory",
    source="allenai/OLMo-core PR#828, pytorch/torchtitan#1323: dropout that drops anew in the "
    "backward, gradient error 0.9",
)
def test_recomputed_layers(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    start = distributed.start_of(model, dropout=True)
    again = replace(start, settings=DistributionSettings(checkpoint_activations=True))
    shares = distributed.ragged_shares(rng, COUNTS[:world_size], 2)
    starts = {"kept": start, "again": again, "without dropout": replace(start, dropout=False)}
    results = ranks.run(rank_programs.accumulated_by_each, starts, shares, world_size=world_size)
    for result in results:
        kept, computed = (toys.flat(result[name].tensors) for name in ("kept", "again"))
        check("relative gradient error", relative_error(computed, kept), at_most=1e-12,
              because="the same operations on the same numbers, dropped alike")  # fmt: skip
        other = toys.flat(result["without dropout"].tensors)
        check("difference that dropout makes", relative_error(other, kept), at_least=0.01,
              because="without it nothing is tested")  # fmt: skip
        attentions = [result[name].num_attentions for name in ("kept", "again")]
        check("calls of attention", attentions, equal=[4, 8],
              because="two layers, two microbatches, and each once more if asked for")  # fmt: skip


@gate(
    claim="torch's own DDP around the plain model leaves the same gradient",
    roles=["distribute", "accumulate"],
    not_claimed="independence of torch's collectives",
    source="DDP is used by everyone, and shares no line with the reference's reduction",
)
def test_beside_ddp(stack, ranks, world_size, rng, device, check):
    model = toys.tiny_model(stack, device, initializer_std=0.2)
    shares = distributed.ragged_shares(rng, COUNTS[:world_size], 2)
    start = distributed.start_of(model)
    results = ranks.run(rank_programs.accumulated_beside_ddp, start, shares, world_size=world_size)
    for result in results:
        check(
            "relative gradient error against DDP",
            worst_relative(result["roles"].tensors, result["ddp"].tensors),
            at_most=toys.rounding(toys.working_dtype(stack)),
            because=SUMMATION,
        )
