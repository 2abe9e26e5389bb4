"""Checkpoints that lose or change a part, or keep the wrong ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness import benign, fault

FILE = "m2_checkpoint::"
ROUND_TRIP, RESTORED = f"{FILE}test_round_trip", f"{FILE}test_restored"
RETENTION = f"{FILE}test_retention"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def load_changed(reference, change):
    """A load that gives change(snapshot)."""
    return lambda directory, expected: change(reference.load(directory, expected))


def save_changed(reference, change):
    """A save that writes change(snapshot)."""
    return lambda root, snapshot, *keep: reference.save(root, change(snapshot), *keep)


def optimizer_changed(snapshot, change):
    """The snapshot with change(state) in place of every parameter's optimizer state."""
    changed = {name: change(state) for name, state in snapshot.optimizer.items()}
    return replace(snapshot, optimizer=changed)


@fault(
    role="load",
    caught_by=[ROUND_TRIP, RESTORED],
    seen_in="KempnerInstitute/KempnerForge PR#115",
)
def drops_the_moments(reference):
    """The optimizer's state is not filled in, without an error."""
    return load_changed(reference, lambda snapshot: replace(snapshot, optimizer={}))


@fault(role="load", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def counts_adam_s_steps_from_one(reference):
    """The moments come back, the number of steps that corrects their bias does not."""
    return load_changed(
        reference,
        lambda snapshot: optimizer_changed(snapshot, lambda state: replace(state, step=1)),
    )


@fault(role="save", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def one_step_for_all_parameters(reference):
    """One count of steps is saved for all: a parameter with fewer updates gets that of the rest."""

    def change(snapshot):
        most = max(state.step for state in snapshot.optimizer.values())
        return optimizer_changed(snapshot, lambda state: replace(state, step=most))

    return save_changed(reference, change)


@fault(role="load", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def moments_by_position(reference):
    """Moments are told apart by their place in a list, and two of one shape change places."""

    def change(snapshot):
        names = [name for name in snapshot.optimizer if name.endswith("input_layernorm.weight")]
        moved = dict(zip(names, names[1:] + names[:1], strict=True))
        optimizer = {name: snapshot.optimizer[moved.get(name, name)] for name in snapshot.optimizer}
        return replace(snapshot, optimizer=optimizer)

    return load_changed(reference, change)


@fault(role="save", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def stores_bfloat16(reference):
    """Parameters go through 16 bits on their way to the file."""
    return save_changed(
        reference,
        lambda snapshot: replace(
            snapshot,
            parameters={
                name: tensor.bfloat16().to(tensor.dtype)
                for name, tensor in snapshot.parameters.items()
            },
        ),
    )


@fault(
    role="load",
    caught_by=[f"{ROUND_TRIP}[tied]", f"{RESTORED}[tied]"],
    seen_in="NVIDIA-NeMo/Automodel PR#2511",
)
def loses_the_tie(reference):
    """The configuration says tied; what is loaded has two tables and no tie."""

    def change(snapshot):
        parameters = dict(snapshot.parameters)
        for name, first in snapshot.ties.items():
            parameters[name] = parameters[first].clone()
        return replace(snapshot, parameters=parameters, ties={})

    return load_changed(reference, change)


@fault(
    role="save",
    caught_by=[f"{ROUND_TRIP}[untied]", f"{RESTORED}[untied]"],
    seen_in="NVIDIA-NeMo/Automodel#2571",
)
def writes_the_embedding_for_the_head(reference):
    """The head is left out and rebuilt from the embedding, from which it has long moved away."""

    def change(snapshot):
        parameters = dict(snapshot.parameters)
        if HEAD in parameters:
            parameters[HEAD] = parameters[EMBEDDING].clone()
        return replace(snapshot, parameters=parameters)

    return save_changed(reference, change)


@fault(role="save", caught_by=ROUND_TRIP, seen_in="own")
def forgets_the_sampler(reference):
    """Only torch's global generators are kept, not the one that the sampler draws from."""

    def change(snapshot):
        kept = {name: s for name, s in snapshot.random.items() if not name.endswith("sampler")}
        return replace(snapshot, random=kept)

    return save_changed(reference, change)


@fault(role="load", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def leaves_the_generators_as_they_are(reference):
    """The random state that is loaded is the one that happens to be there."""

    def load(directory, expected):
        snapshot = reference.load(directory, expected)
        return replace(snapshot, random={**snapshot.random, "cpu": torch.get_rng_state()})

    return load


@fault(role="save", caught_by=ROUND_TRIP, seen_in="paiml/entrenar#294")
def forgets_the_position(reference):
    """The position in the data is saved as the beginning."""

    def change(snapshot):
        return replace(snapshot, data={**snapshot.data, "epoch": 0, "window": 0})

    return save_changed(reference, change)


@fault(role="save", caught_by=[ROUND_TRIP, RESTORED], seen_in="own")
def forgets_the_loss_scale(reference):
    """A loss scale that took long to find starts from its default again."""
    return save_changed(reference, lambda snapshot: replace(snapshot, loss_scale=None))


@fault(role="save", caught_by=ROUND_TRIP, seen_in="own")
def forgets_what_the_run_was_made_of(reference):
    """The hashes of manifest, tokenizer and code are not written down."""

    def change(snapshot):
        return replace(snapshot, identity=dict.fromkeys(snapshot.identity))

    return save_changed(reference, change)


@fault(role="load", caught_by=[ROUND_TRIP, RESTORED], seen_in="modelscope/ms-swift#10099")
def one_counter_for_all(reference):
    """The targets that were applied are taken for the tokens that were read."""

    def change(snapshot):
        counters = replace(snapshot.counters, tokens_read=snapshot.counters.tokens_updated)
        return replace(snapshot, counters=counters)

    return load_changed(reference, change)


@fault(role="save", caught_by=ROUND_TRIP, seen_in="Lightning-AI/pytorch-lightning PR#21079")
def advances_the_live_state(reference):
    """Saving counts a step in the state that it was given."""

    def save(root, snapshot, *keep):
        for state in snapshot.optimizer.values():
            state.step += 1
        return reference.save(root, snapshot, *keep)

    return save


# --- which ones are kept ---------------------------------------------------------------------


@fault(role="save", caught_by=[f"{RETENTION}[2-3]", f"{RETENTION}[3-4]"], seen_in="own")
def removes_every_k_th_too(reference):
    """Only the last ones are kept; those that were to stay for good go."""
    return lambda root, snapshot, last, every: reference.save(root, snapshot, last, 0)


@fault(role="save", caught_by=RETENTION, seen_in="own")
def keeps_everything(reference):
    """Nothing is ever removed: the disk fills up in the end."""
    return lambda root, snapshot, last, every: reference.save(root, snapshot, 10**6, every)


@fault(
    role="save",
    caught_by=[f"{RETENTION}[{case}]" for case in ("2-0", "2-3", "3-4")],
    seen_in="own",
)
def keeps_one_too_few(reference):
    """The one that was just written is counted twice."""
    return lambda root, snapshot, last, every: reference.save(root, snapshot, last - 1, every)


# --- right, in another way -------------------------------------------------------------------

EVERY_SAVE = [
    ROUND_TRIP,
    RESTORED,
    RETENTION,
    f"{FILE}test_refused_folder",
    f"{FILE}test_refused_expectation",
    "m2_resume::test_resume[mid-epoch]",
    "m2_resume::test_resume[twice]",
    "m2_atomic::test_killed_at_every_operation[second]",
    "m2_atomic::test_refused_by_the_disk[read-only]",
]


@benign(role="save", accepted_by=EVERY_SAVE, because="tensors are found by name")
def writes_tensors_in_another_order(reference):
    """Parameters and moments from the last to the first."""

    def change(snapshot):
        return replace(
            snapshot,
            parameters=dict(reversed(snapshot.parameters.items())),
            optimizer=dict(reversed(snapshot.optimizer.items())),
        )

    return save_changed(reference, change)
