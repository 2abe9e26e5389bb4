"""Saving beside training: the copy is made at once, it is written in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from reference.checkpoint.state import Snapshot


class BackgroundSaver:
    """Calls `save(snapshot)` in a thread, one at a time.

    save: such as `functools.partial(stack.save, root, keep_last=2)`. A snapshot is a copy, so
    later updates do not change what is written; taken with `on_device=True` it costs training the
    copy in the device's memory only.

    An error of a save is raised by the next `submit`, `wait` or `close`, once.

    Several ranks submit snapshots of the same instants in the same order, each to a saver of its
    own. Their threads make no collective, so that training goes on meanwhile; the checkpoint
    appears when all have written, and an error is raised on all of them, by the same call.
    """

    def __init__(self, save: Callable[[Snapshot], Path]) -> None:
        self._save = save
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Begins to write `snapshot`, after the one before it is written."""
        self.wait()
        device = next((t.device for t in snapshot.parameters.values() if not t.is_cpu), None)
        copied = None
        if device is not None:
            module: Any = torch.get_device_module(device)
            copied = module.current_stream(device).record_event()
        self._in_flight = self._executor.submit(self._write, snapshot, device, copied)

    def wait(self) -> Path | None:
        """Ends when nothing is being written; what the last save returned, if it was not asked."""
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def close(self) -> None:
        """Waits and ends the thread; the saver takes no more."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, snapshot: Snapshot, device: torch.device | None, copied: Any) -> Path:
        if device is None:
            return self._save(snapshot)
        # On a stream of its own: reading the copy must not wait for the updates queued behind it.
        module: Any = torch.get_device_module(device)
        stream = module.Stream(device)
        stream.wait_event(copied)
        with module.stream(stream):
            return self._save(snapshot)
