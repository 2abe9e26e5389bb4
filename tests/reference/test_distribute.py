"""Several ranks: shards are clipped and updated as the whole, and ranks agree."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from reference.config import preset
from reference.distribute import (
    DistributionSettings,
    data_group,
    distribute,
    named_parameters,
)
from reference.loss_scale import LossScaling
from reference.model import build_model
from reference.optimizer import clip_grad_norm, optimizer_step, param_groups
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import train
from reference.update import NonFiniteError, TrainState, UpdateSettings, accumulate, update_window
from reference.window import Microbatch, Window

STACK = SimpleNamespace(**ROLES)
CONFIG = replace(preset("bytes-0.09m"), model_width=8, feed_forward_width=8, num_layers=1)
SETTINGS = UpdateSettings(Schedule(peak=1e-2, total_tokens=1000))
NUM_RANKS = 2


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    return build_model(replace(CONFIG, **changes), STACK)


def window_of(seed, num_rows=3, num_microbatches=1):
    ids = torch.randint(257, (num_rows, 8), generator=torch.Generator().manual_seed(seed))
    window = Window((Microbatch(ids, ids.roll(-1, 1), torch.arange(8).expand(num_rows, 8)),))
    return window.split(num_microbatches)


def mesh_of(*shape):
    names = ("data",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- what every rank does; each result is compared in a test below ----------------------------


def seeds_may_differ(rank):
    model = model_of(seed=rank)
    model.register_buffer("table", torch.full((2,), float(rank)))
    distribute(model, mesh_of(1, 2), DistributionSettings())
    tied = model.lm_head.weight is model.embed_tokens.weight
    return bits(model), model.table.clone(), tied


def shards_and_their_whole(rank):
    """Norms and parameters of a sharded model, and of the same model whole."""
    sharded, whole = model_of(), model_of()
    fully_shard(sharded.layers[0], mesh=mesh_of(2))
    fully_shard(sharded, mesh=mesh_of(2))
    random = torch.Generator().manual_seed(4)
    for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
        q.grad = torch.randn(q.shape, generator=random)
        p.grad = distribute_tensor(q.grad.clone(), p.device_mesh, p.placements)
    found = {}
    for norm_type in (2.0, math.inf):
        found[norm_type] = [
            float(clip_grad_norm(list(model.parameters()), 0.1, group, norm_type))
            for model, group in ((sharded, dist.group.WORLD), (whole, None))
        ]
    for model in (sharded, whole):
        for _ in range(2):
            optimizer_step(param_groups(model, 0.1), {}, 1e-2, (0.9, 0.95), 1e-8)
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return found, [(p.full_tensor().detach(), q.detach()) for p, q in pairs]


def several_meshes(rank):
    """The norm of 3 in a plain tensor, 4 in shards, 12 in replicas, 84 in partial sums."""
    gradients = [
        torch.tensor([3.0, 0.0]),
        distribute_tensor(torch.tensor([0.0, 4.0]), mesh_of(2), [Shard(0)]),
        distribute_tensor(torch.tensor([12.0]), mesh_of(2, 1), [Replicate(), Shard(0)]),
    ]
    partial = distribute_tensor(torch.tensor([42.0]), mesh_of(2), [Replicate()])
    local = partial.to_local()
    gradients.append(type(partial).from_local(local, partial.device_mesh, [Partial()]))
    parameters = [SimpleNamespace(grad=gradient) for gradient in gradients]
    norm = float(clip_grad_norm(parameters, 8.5, dist.group.WORLD))
    return norm, [p.grad.full_tensor() if i else p.grad for i, p in enumerate(parameters)]


def used_by_one_rank(rank):
    """Adapters that the second rank does not use, and one that no rank uses."""
    model = model_of()
    model.used_by_the_first = nn.Parameter(torch.ones(8))
    model.used_by_none = nn.Parameter(torch.ones(8))
    if rank == 0:
        model.norm.register_forward_hook(lambda m, i, y: y * model.used_by_the_first)
    accumulate(model, window_of(rank), dist.group.WORLD)
    return model.used_by_the_first.grad, model.used_by_none.grad, bits_of_gradients(model)


def bits_of_gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _nll_that_is_nan(*arguments):
    nll_sum, num_targets = ROLES["token_nll"](*arguments)
    return nll_sum + math.nan, num_targets


def one_rank_is_not_finite(rank):
    """float16, and a loss on the second rank that no gradient sees."""
    found = {}
    for kind in ("skip", "stop"):
        model = model_of(compute_dtype=torch.float16)
        scaling = LossScaling(initial=8.0, interval=1)
        settings = replace(SETTINGS, on_non_finite=kind, loss_scaling=scaling)
        training = TrainState(model, param_groups(model, 0.1), group=dist.group.WORLD)
        update_window(training, window_of(rank), STACK, settings)
        if rank == 1:
            model.stack = SimpleNamespace(**{**ROLES, "token_nll": _nll_that_is_nan})
        before = training.loss_scale
        try:
            update_window(training, window_of(rank), STACK, settings)
            stopped = False
        except NonFiniteError:
            stopped = True
        found[kind] = (stopped, before, training.loss_scale, training.counters)
    return found


def trained_together(rank):
    # Windows of 5, 3 and 1 rows: shares of unequal sizes, and one without a row.
    windows = [window_of(0, 5, 2), window_of(1, 3), window_of(2, 1)]
    result = train(
        CONFIG, STACK, windows, SETTINGS, 3, "cpu", 55, "trim",
        mesh=mesh_of(2), distribution=DistributionSettings(checkpoint_activations=True),
    )  # fmt: skip
    alone = train(CONFIG, STACK, windows, SETTINGS, 3, "cpu", 55, "trim")
    return result.records, bits(result.model), alone.records, bits(alone.model)


def refused(rank):
    messages = []
    for attempt in (
        lambda: distribute(model_of(), init_device_mesh("cpu", (2,)), DistributionSettings()),
        lambda: data_group(mesh_of(1, 2)["shard"]),
        lambda: distribute(nn.Linear(2, 2), mesh_of(2), DistributionSettings(torch.bfloat16)),
        lambda: distribute(nn.Linear(2, 2), mesh_of(2), DistributionSettings(None, True)),
    ):
        try:
            attempt()
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
    return messages


PROGRAMS = (
    seeds_may_differ, shards_and_their_whole, several_meshes, used_by_one_rank,
    one_rank_is_not_finite, trained_together, refused,
)  # fmt: skip


def _rank(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    found = {program.__name__: program(rank) for program in PROGRAMS}
    torch.save(found, folder / f"rank-{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{program: what it gave on each rank}: all of them run in one start of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.start_processes(_rank, (folder,), NUM_RANKS, start_method="spawn")
    found = [torch.load(folder / f"rank-{rank}", weights_only=False) for rank in range(NUM_RANKS)]
    return {name: [result[name] for result in found] for name in found[0]}


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_all_ranks_start_with_the_values_of_the_first(results):
    (first, table, tied), (second, other_table, _) = results["seeds_may_differ"]
    assert equal(first, second) and equal(first, bits(model_of(seed=0)))
    assert torch.equal(table, other_table) and float(table[0]) == 0.0
    assert tied


def test_shards_are_clipped_and_updated_as_the_whole(results):
    for norms, parameters in results["shards_and_their_whole"]:
        for sharded, whole in norms.values():
            assert sharded == pytest.approx(whole, rel=1e-6)
        assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in parameters)


def test_parts_on_several_meshes_make_one_norm(results):
    for norm, gradients in results["several_meshes"]:
        assert norm == pytest.approx(85.0)
        values = [float(gradient.abs().max()) for gradient in gradients]
        assert values == pytest.approx([0.3, 0.4, 1.2, 8.4])


def test_a_parameter_of_one_rank_alone_takes_part_with_zeros(results):
    (first, none, gradients), (second, other_none, others) = results["used_by_one_rank"]
    assert float(first.abs().max()) > 0 and torch.equal(first, second)
    assert none is None and other_none is None
    assert equal(gradients, others)


def test_what_is_not_finite_on_one_rank_is_skipped_or_stops_on_all(results):
    first, second = results["one_rank_is_not_finite"]
    assert first == second
    stopped, before, after, counters = first["skip"]
    assert not stopped and before.scale == 16.0 and after.scale == 8.0
    assert (after.skipped_updates, counters.optimizer_steps) == (1, 1)
    stopped, before, after, counters = first["stop"]
    assert stopped and before == after and counters.optimizer_steps == 1


def test_ranks_train_as_one_process_does(results):
    (records, parameters, alone, wanted), (other_records, other_parameters, *_) = results[
        "trained_together"
    ]
    assert records == other_records and equal(parameters, other_parameters)
    assert all(torch.allclose(p, q, atol=2e-4) for p, q in zip(parameters, wanted, strict=True))
    for got, want in zip(records, alone, strict=True):
        assert got.loss_nats == pytest.approx(want.loss_nats, rel=1e-5)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-3)
        assert got.learning_rate == want.learning_rate
        assert got.counters.tokens_updated == want.counters.tokens_updated


def test_what_cannot_be_distributed_is_refused(results):
    names, part, dtype, layers = results["refused"][0]
    assert "must be named" in names
    assert "must be named" in part
    assert "no config.compute_dtype" in dtype
    assert "no `layers`" in layers


def test_names_are_those_of_the_model_that_was_wrapped():
    model = model_of()
    names = [name for name, _ in model.named_parameters()]
    wrapped = nn.Module()
    wrapped.module = torch.compile(model)
    assert [name for name, _ in named_parameters(wrapped)] == names
