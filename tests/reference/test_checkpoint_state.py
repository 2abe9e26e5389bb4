"""A snapshot holds all that the next update depends on, and shares nothing with the run."""

from dataclasses import replace

import pytest
import torch
from checkpoint_runs import CONFIG, DATA, IDENTITY, SETTINGS, fresh, run_of, snapshot_of, updated
from torch import nn

from reference.checkpoint import capture, digests, restore
from reference.update import TrainState


def test_a_restored_run_goes_on_as_if_nothing_had_been():
    training = run_of(3)
    snapshot = snapshot_of(training)
    want = updated(training, 6)
    again = fresh(seed=5)
    updated(again, 2)
    restore(snapshot, again)
    assert updated(again, 6) == want
    assert digests(snapshot_of(again)) == digests(snapshot_of(training))


def test_what_was_restored_has_the_digests_of_what_was_captured():
    snapshot, again = snapshot_of(run_of(3)), fresh(seed=5)
    restore(snapshot, again)
    assert digests(snapshot_of(again)) == digests(snapshot)


def test_later_updates_do_not_change_a_snapshot():
    training = run_of(2)
    snapshot = snapshot_of(training)
    before = digests(snapshot)
    updated(training, 1)
    assert digests(snapshot) == before


def test_later_updates_of_a_restored_run_do_not_change_a_snapshot():
    snapshot, again = snapshot_of(run_of(2)), fresh()
    before = digests(snapshot)
    restore(snapshot, again)
    updated(again, 1)
    assert digests(snapshot) == before


CHANGES = [
    ("parameters", lambda s: s.parameters["norm.weight"].add_(1)),
    ("optimizer", lambda s: s.optimizer["norm.weight"].second_moment.add_(1)),
    ("random", lambda s: s.random["cpu"].add_(1)),
    ("data", lambda s: s.data.update(next_window=8)),
    ("config", lambda s: s.config.update(num_layers=9)),
    ("ties", lambda s: s.ties.clear()),
    ("identity", lambda s: s.identity.update(code="c")),
    ("settings", lambda s: s.settings["schedule"].update(peak=1.0)),
    ("weight_decays", lambda s: s.weight_decays.update({"norm.weight": 0.5})),
    ("world", lambda s: s.world.update(world_size=2)),
]


@pytest.mark.parametrize(("part", "change"), CHANGES, ids=[part for part, _ in CHANGES])
def test_a_change_shows_in_the_digest_of_its_part_alone(part, change):
    snapshot = snapshot_of(run_of(1))
    before = digests(snapshot)
    change(snapshot)
    after = digests(snapshot)
    assert {name for name in before if before[name] != after[name]} == {part}


def test_the_count_of_adam_is_a_part_of_the_optimizer():
    snapshot = snapshot_of(run_of(1))
    before = digests(snapshot)["optimizer"]
    snapshot.optimizer["norm.weight"].step += 1
    assert digests(snapshot)["optimizer"] != before


def test_a_tie_is_captured_once_and_survives():
    snapshot, again = snapshot_of(run_of(1)), fresh(seed=5)
    assert snapshot.ties == {"lm_head.weight": "embed_tokens.weight"}
    assert "lm_head.weight" not in snapshot.parameters
    restore(snapshot, again)
    assert again.model.lm_head.weight is again.model.embed_tokens.weight


def test_a_parameter_that_was_never_updated_has_no_state_afterwards():
    snapshot, again = snapshot_of(fresh()), run_of(2)
    restore(snapshot, again)
    assert not again.optimizer_state and again.counters.optimizer_steps == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2}, "num_layers is 1 as saved and 2 in this run"),
        ({"tied_head": False}, "tied_head is True as saved and False"),
    ],
)
def test_another_model_is_refused_before_anything_changes(change, says):
    snapshot, other = snapshot_of(run_of(1)), run_of(2, replace(CONFIG, **change))
    before = digests(snapshot_of(other))
    with pytest.raises(ValueError, match=says):
        restore(snapshot, other)
    assert digests(snapshot_of(other)) == before


def test_another_dtype_is_refused():
    other = fresh()
    other.model.double()
    with pytest.raises(ValueError, match=r"is 'F32 \[.*' as saved and 'F64"):
        restore(snapshot_of(run_of(1)), other)


def test_a_parameter_that_is_frozen_now_is_refused():
    other = fresh()
    other.groups[1]["params"].pop()
    with pytest.raises(ValueError, match="weight decays: only saved"):
        restore(snapshot_of(run_of(1)), other)


def test_a_lost_tie_is_refused():
    training = fresh()
    training.model.lm_head.weight = nn.Parameter(training.model.embed_tokens.weight.detach())
    with pytest.raises(ValueError, match="share memory but are two tensors"):
        snapshot_of(training)


def test_generators_go_on_where_they_were():
    ours = {"sampler": torch.Generator().manual_seed(3)}
    torch.rand(7), torch.rand(7, generator=ours["sampler"])
    snapshot = snapshot_of(fresh(), generators=ours)
    want = torch.rand(5), torch.rand(5, generator=ours["sampler"])
    theirs = {"sampler": torch.Generator()}
    torch.manual_seed(99)
    restore(snapshot, fresh_without_drawing(), theirs)
    got = torch.rand(5), torch.rand(5, generator=theirs["sampler"])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def fresh_without_drawing():
    with torch.random.fork_rng(devices=[]):
        return fresh()


def test_other_generators_are_refused_before_anything_changes():
    snapshot, training = snapshot_of(run_of(1)), fresh()
    before = digests(snapshot_of(training))
    with pytest.raises(ValueError, match="saved of cpu; this run draws from cpu, generator:x"):
        restore(snapshot, training, {"x": torch.Generator()})
    assert digests(snapshot_of(training)) == before


def test_a_random_state_that_is_none_is_refused_before_anything_changes():
    snapshot, training = snapshot_of(run_of(1)), fresh()
    snapshot.random["cpu"].fill_(255)
    before = digests(snapshot_of(training))
    with pytest.raises(ValueError, match="random state of cpu"):
        restore(snapshot, training)
    assert digests(snapshot_of(training)) == before


@pytest.mark.parametrize("data", [{"order": (1, 2)}, {1: 2}])
def test_a_position_that_json_would_change_is_refused(data):
    with pytest.raises(ValueError, match="data_state must be what JSON gives back equal"):
        capture(fresh(), SETTINGS, data, IDENTITY)


def test_an_unknown_hash_is_refused():
    with pytest.raises(ValueError, match="identity has the keys manifest"):
        capture(fresh(), SETTINGS, DATA, {"manifesto": "x"})


def test_a_model_without_a_configuration_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"model\.config must be a dataclass"):
        capture(TrainState(model, []), SETTINGS, DATA, IDENTITY)


def test_a_state_of_a_parameter_that_the_model_does_not_have_is_refused():
    training = run_of(1)
    training.optimizer_state[nn.Parameter(torch.zeros(1))] = next(
        iter(training.optimizer_state.values())
    )
    with pytest.raises(ValueError, match="the optimizer has 1 parameters"):
        snapshot_of(training)
