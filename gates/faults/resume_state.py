"""Wrong ways to go on: from a state that is not the one that was saved."""

from __future__ import annotations

from dataclasses import replace

import torch

from gates.faults.checkpoint import load_changed
from gates.faults.resume import Inner, cases, train_changed
from harness import fault
from reference.checkpoint.state import named_tensors

PROCESS = "m2_resume::test_another_process"


@fault(
    role="load",
    caught_by=cases("mid-epoch", "background"),
    seen_in="KempnerInstitute/KempnerForge PR#115",
)
def resumes_with_fresh_moments(reference):
    """The moments are dropped: the optimizer starts anew."""

    def load(directory, expected):
        return replace(reference.load(directory, expected), optimizer={})

    return load


@fault(
    role="load", caught_by=cases("mid-epoch"), seen_in="Lightning-AI/pytorch-lightning#1772, #4655"
)
def resumes_the_schedule_one_window_behind(reference):
    """The schedule was saved before its step: its count lacks the last window."""
    return load_changed(
        reference,
        lambda snapshot: replace(
            snapshot,
            counters=replace(
                snapshot.counters,
                tokens_updated=snapshot.counters.tokens_updated - 12,
            ),
        ),
    )


@fault(
    role="train",
    caught_by=cases("mid-epoch"),
    seen_in="Nerogar/OneTrainer#1604, pytorch/pytorch#60265",
)
def rebuilds_the_schedule_for_the_rest(reference):
    """The learning rate of a resumed run is counted from the resume."""

    def change(stack, windows, resumed):
        begun = []

        def update_window(training, window, inner, settings):
            begun.append(training.counters.tokens_updated)
            return stack.update_window(training, window, inner, settings)

        def learning_rate(tokens_done, schedule):
            return stack.learning_rate(tokens_done - begun[0] * resumed, schedule)

        changed = {"update_window": update_window, "learning_rate": learning_rate}
        return stack.replace(changed), windows

    return train_changed(reference, change)


@fault(role="load", caught_by=cases("mid-epoch", "dropout"), seen_in="own")
def reseeds_the_generators(reference):
    """The random state is that of a fresh seed."""

    def load(directory, expected):
        snapshot = reference.load(directory, expected)
        fresh = torch.Generator().manual_seed(0).get_state()
        return replace(snapshot, random={**snapshot.random, "cpu": fresh})

    return load


@fault(role="train", caught_by=cases("dropout"), seen_in="own")
def draws_after_the_generators_were_restored(reference):
    """One number is drawn between the restored random state and the first update."""

    def change(stack, windows, resumed):
        class Drawing(Inner):
            def __iter__(self):
                if resumed:
                    torch.rand(())
                return super().__iter__()

        return stack, Drawing(windows)

    return train_changed(reference, change)


@fault(
    role="train",
    caught_by=cases("mid-epoch", "epoch-end", "background"),
    seen_in="pytorch/pytorch#144657, Lightning-AI/pytorch-lightning PR#21079",
)
def writes_the_parameters_of_the_next_update(reference):
    """An asynchronous save holds live tensors: it writes what the next update has made of them."""

    def change(stack, windows, resumed):
        waiting = []

        def save(directory, snapshot, *keep):
            waiting.append((directory, snapshot, keep))

        def update_window(training, window, inner, settings):
            record = stack.update_window(training, window, inner, settings)
            for directory, snapshot, keep in waiting:
                live, _ = named_tensors(training.model)
                now = {name: tensor.detach().cpu() for name, tensor in live.items()}
                stack.save(directory, replace(snapshot, parameters=now), *keep)
            waiting.clear()
            return record

        return stack.replace({"save": save, "update_window": update_window}), windows

    return train_changed(reference, change)


@fault(
    role="train",
    caught_by=cases("mid-epoch"),
    seen_in="NVIDIA-NeMo/Automodel PR#2511, verl-project/verl PR#7835",
)
def unties_after_a_resume(reference):
    """The configuration says tied; after a resume the head is a copy that nobody trains."""

    def change(stack, windows, resumed):
        def update_window(training, window, inner, settings):
            head, model = training.model.lm_head, training.model
            if resumed and head.weight is model.embed_tokens.weight:
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
            return stack.update_window(training, window, inner, settings)

        return stack.replace({"update_window": update_window}), windows

    return train_changed(reference, change)


@fault(role="train", caught_by=cases("mid-epoch", "background"), seen_in="own")
def starts_again_in_silence(reference):
    """A run that is to go on finds nothing where it looks, and starts from its beginning."""

    def train(config, stack, windows, *rest, checkpoints=None):
        if checkpoints is not None and checkpoints.resume:
            elsewhere = f"{checkpoints.directory}-resumed"
            checkpoints = replace(checkpoints, directory=elsewhere)
        return reference.train(config, stack, windows, *rest, checkpoints=checkpoints)

    return train


KEPT: dict[int, object] = {}


@fault(role="train", caught_by=PROCESS, seen_in="own")
def keeps_the_moments_in_memory(reference):
    """The moments stay in the process that saved; the files hold zeros in their place."""

    def train(config, stack, windows, *rest, checkpoints=None):
        def save(root, snapshot, *keep):
            KEPT[snapshot.counters.optimizer_steps] = snapshot.optimizer
            zeros = {
                name: replace(adam, second_moment=torch.zeros_like(adam.second_moment))
                for name, adam in snapshot.optimizer.items()
            }
            return stack.save(root, replace(snapshot, optimizer=zeros), *keep)

        def load(directory, expected):
            snapshot = stack.load(directory, expected)
            kept = KEPT.get(snapshot.counters.optimizer_steps, snapshot.optimizer)
            return replace(snapshot, optimizer=kept)

        remembering = stack.replace({"save": save, "load": load})
        return reference.train(config, remembering, windows, *rest, checkpoints=checkpoints)

    return train
