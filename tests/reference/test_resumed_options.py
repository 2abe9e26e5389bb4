"""A refused resume names the options that differ; what they are refuses nothing by itself."""

import json

import pytest
from checkpoint_runs import DATA, SETTINGS, STACK, fresh, hashed_again, on_each, peers

from reference import resume
from reference.checkpoint import capture
from reference.checkpoint.commit import latest
from reference.resume import Checkpoints
from reference.resumed_options import KEPT, OPTIONS, kept_options, named_options
from reference.train_options import parser_of_train


def kept(*arguments, learning_rate=6e-3):
    return kept_options(parser_of_train().parse_args(arguments), learning_rate)


def saved(folder, options):
    STACK.save(folder, capture(fresh(), SETTINGS, DATA, {OPTIONS: options}), 2, 0)
    return latest(folder)


def refused(checkpoint, ours, error="of other settings"):
    with (
        pytest.raises(ValueError, match="of other settings") as caught,
        named_options(checkpoint, ours),
    ):
        raise ValueError(error)
    return str(caught.value)


def test_every_kept_option_is_one_of_the_command():
    options = json.loads(kept("--updates", "6"))
    assert len(options) == len(KEPT) and options["--updates"] == "6"
    help_text = parser_of_train().format_help()
    assert all(f"{option} " in help_text for option in options)
    assert options["--learning-rate"] == "0.006" and options["--lora-rank"] is None


def test_the_options_that_differ_are_named_with_both_values(tmp_path):
    checkpoint = saved(tmp_path, kept("--updates", "6", "--init", "a b"))
    said = refused(checkpoint, kept("--updates", "12", learning_rate=0.1))
    assert said == (
        "of other settings; of the options differ: --updates 6 as saved, 12 now; --learning-rate "
        "0.006 as saved, 0.1 now; --init a b as saved, not given now; give them as saved, or "
        "choose another directory"
    )


def test_other_options_alone_refuse_nothing(tmp_path):
    checkpoint = saved(tmp_path, kept("--data", "here"))
    with named_options(checkpoint, kept("--data", "there")):
        pass


@pytest.mark.parametrize(
    ("before", "now"), [("--seed 1", "--seed 1"), (None, "--seed 1"), ("--seed 1", None)]
)
def test_an_error_that_no_option_explains_stays_as_it_is(tmp_path, before, now):
    options = [text and kept(*text.split()) for text in (before, now)]
    assert refused(saved(tmp_path, options[0]), options[1]) == "of other settings"


@pytest.mark.parametrize("kept_by_another_program", ["lr 3", "[1]", '"x"', "{}"])
def test_options_that_are_not_this_commands_are_passed_over(tmp_path, kept_by_another_program):
    checkpoint = saved(tmp_path, kept_by_another_program)
    assert refused(checkpoint, kept("--seed", "1")) == "of other settings"
    with pytest.raises(ValueError, match=r"^other$"), named_options(checkpoint, "lr 4"):
        raise ValueError("other")


def test_all_ranks_keep_the_first_ones_options(tmp_path, monkeypatch):
    """On another host the same data has another path: the first save refused the ranks."""
    ranks = peers(2)
    monkeypatch.setattr(resume, "peers_of", lambda rank: ranks[rank])

    def identity(rank):
        options = kept("--data", f"/host{rank}/data")
        checkpoints = Checkpoints(tmp_path, 1, identity={"code": "c", OPTIONS: options})
        return resume._identity_of_all(checkpoints, rank)

    found = on_each(identity, range(2))
    assert found == [{"code": "c", OPTIONS: kept("--data", "/host0/data")}] * 2


def test_of_a_damaged_file_the_damage_comes_first(tmp_path):
    checkpoint = saved(tmp_path, kept("--seed", "1"))
    said = refused(checkpoint, kept("--seed", "2"), "of other settings: a file was changed")
    assert said.startswith("of other settings: a file was changed; ")


def test_of_a_damaged_checkpoint_the_damage_is_said(tmp_path):
    checkpoint = saved(tmp_path, kept("--seed", "1"))
    (checkpoint / "state.json").write_text("{}")
    hashed_again(checkpoint, "state.json")
    assert refused(checkpoint, kept("--seed", "2")) == "of other settings"
