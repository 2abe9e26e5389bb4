"""A training run that can be stopped at any instant and gone on with, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from reference.anomaly import AnomalyWatch
from reference.checkpoint.background import BackgroundSaver
from reference.checkpoint.commit import latest
from reference.checkpoint.load import expected, resumption
from reference.checkpoint.peers import peers_of
from reference.checkpoint.random_state import random_state
from reference.checkpoint.state import Snapshot, capture, restore
from reference.group import sum_counts
from reference.resumed_options import OPTIONS, named_options
from reference.update import TrainState, UpdateSettings
from reference.window import Window

# Of the identity. Another evaluation does not change a run, and other code is warned of.
COMPARED = ("manifest", "tokenizer")


def _never() -> bool:
    return False


def _silent(sentence: str) -> None:
    pass


@dataclass(frozen=True)
class Checkpoints:
    """Where a run is kept, how often, and what else belongs to its state.

    every: optimizer updates; besides, a run saves when it ends and when it is stopped. keep_last,
    keep_every, identity, generators: as in `save` and `capture`. resume: go on from the newest
    checkpoint in `directory`; without one the run starts. background: write in a thread. stop:
    asked after every window; True: save and return. announce: is told where a resumed run goes on
    from, and how exactly: see `resumption`.

    Several ranks have the same, but for `stop`: one True stops all of them after the same window.

    Raises ValueError for every or keep_last < 1 and for keep_every < 0.
    """

    directory: Path | str
    every: int
    keep_last: int = 2
    keep_every: int = 0
    resume: bool = False
    background: bool = False
    identity: Mapping[str, str | None] = field(default_factory=dict)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    stop: Callable[[], bool] = _never
    announce: Callable[[str], object] = _silent

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(
                "Checkpoints.every and keep_last must be >= 1 and keep_every >= 0, got "
                f"{self.every}, {self.keep_last} and {self.keep_every}"
            )


class Keeper:
    """Puts the newest checkpoint into a run that is about to start, and saves it as it goes.

    stack: what the run's updates are to use, the given one under the eye of an AnomalyWatch.

    Raises ValueError for windows without a position, for a directory that holds checkpoints
    although `resume` is False, and, naming what differs, options too, for a checkpoint of another
    run. OSError if the directory cannot be made.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        training: TrainState,
        settings: UpdateSettings,
        windows: Any,
        stack: Any,
    ) -> None:
        if not hasattr(windows, "load_state_dict"):
            raise ValueError(
                "a run with checkpoints needs windows with state_dict and load_state_dict, such as "
                f"training_text.Windows; got {type(windows).__name__}"
            )
        checkpoints = replace(checkpoints, identity=_identity_of_all(checkpoints, training.group))
        self._checkpoints, self._training, self._settings = checkpoints, training, settings
        self._windows, self._directory = windows, Path(checkpoints.directory)
        self._write: Callable[[Snapshot], Any] = lambda snapshot: stack.save(
            self._directory, snapshot, checkpoints.keep_last, checkpoints.keep_every
        )
        self._background = BackgroundSaver(self._write) if checkpoints.background else None
        self._saved_steps: int | None = None
        self._position: dict[str, Any] = {}
        self._start(stack)
        self.stack = AnomalyWatch(
            stack, training, self._directory, self._snapshot, self._random_state
        )

    def _start(self, stack: Any) -> None:
        newest = self._newest()
        if newest is None:
            return
        if not self._checkpoints.resume:
            raise ValueError(
                f"{newest} is there already; resume from it or choose another directory"
            )
        identity = self._checkpoints.identity
        must_be_equal = {key: identity[key] for key in COMPARED if key in identity}
        want = expected(self._training, self._settings, must_be_equal)
        with named_options(newest, identity.get(OPTIONS)):
            snapshot = stack.load(newest, want)
            self._windows.load_state_dict(snapshot.data)
        if snapshot.identity["code"] != identity.get("code"):
            warnings.warn(
                f"{newest} was saved by other code; from here on the run may differ from one that "
                "was never stopped",
                stacklevel=3,
            )
        how = resumption(snapshot.world, want.world)
        self._checkpoints.announce(f"resuming from {newest}, {how}")
        restore(snapshot, self._training, self._checkpoints.generators)
        self._saved_steps = snapshot.counters.optimizer_steps

    def _newest(self) -> Path | None:
        """The newest checkpoint, as the first rank finds it."""

        def find() -> str | None:
            self._directory.mkdir(parents=True, exist_ok=True)  # before the work it is to keep
            newest = latest(self._directory)
            return None if newest is None else str(newest)

        found = peers_of(self._training.group).first(f"find in {self._directory}", find)
        return None if found is None else Path(found)

    def begin(self) -> Iterator[Window]:
        """The windows that are left."""
        source: Iterator[Window] = iter(self._windows)
        self._position = self._windows.state_dict()
        return source

    def after_window(self) -> bool:
        """Saves if it is time; True if the run is to stop."""
        self._position = self._windows.state_dict()
        stop = self._is_asked_to_stop()
        steps = self._training.counters.optimizer_steps
        if stop or (steps and steps % self._checkpoints.every == 0):
            self._save()
        return stop

    def _is_asked_to_stop(self) -> bool:
        device = next(self._training.model.parameters()).device
        return sum_counts([self._checkpoints.stop()], self._training.group, device)[0] > 0

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Saves the end of a run that did not fail, and waits until all is written."""
        try:
            if error is None:
                self._save()
        finally:
            if self._background is not None:
                self._background.close()

    def _save(self) -> None:
        """Saves, unless no update was applied since: windows that were skipped are read again."""
        steps = self._training.counters.optimizer_steps
        if steps == self._saved_steps:
            return
        if self._background is None:
            self._write(self._snapshot())
        else:
            self._background.submit(self._snapshot(on_device=True))
        self._saved_steps = steps

    def _snapshot(self, on_device: bool = False) -> Snapshot:
        chosen = self._checkpoints
        return capture(
            self._training, self._settings, self._position, chosen.identity, chosen.generators,
            on_device=on_device,
        )  # fmt: skip

    def _random_state(self) -> dict[str, torch.Tensor]:
        device = next(self._training.model.parameters()).device
        return random_state(device, self._checkpoints.generators)


def _identity_of_all(checkpoints: Checkpoints, group: Any) -> Mapping[str, str | None]:
    """With the first rank's options: on another host the same data may have another path."""
    identity = checkpoints.identity
    topic = f"keep the options in {checkpoints.directory}"
    first = peers_of(group).first(topic, lambda: identity.get(OPTIONS))
    return identity if first is None else {**identity, OPTIONS: first}
