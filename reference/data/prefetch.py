"""Windows made ahead of their use by a thread, without losing count of those that were used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol

from reference.window import Window

POLL_S = 0.05  # how often a waiting side looks whether the other one has gone


class Position(Protocol):
    """Windows that know where they are."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Window]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetch:
    """The same windows in the same order, up to `num_ahead` of them made before they are asked for.

    Its position is that of the next window to be handed out, not of the next one to be made: what
    waits in the queue when a run ends is made again after a resume. A new pass ends the one before,
    which then raises RuntimeError. An error of the thread is raised where its window was due.

    Raises ValueError for num_ahead < 1.
    """

    def __init__(self, windows: Position, num_ahead: int) -> None:
        if num_ahead < 1:
            raise ValueError(f"num_ahead must be >= 1, got {num_ahead}")
        self.windows, self.num_ahead = windows, num_ahead
        self._state = windows.state_dict()
        self._worker: _Worker | None = None

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Window]:
        self.close()
        windows = iter(self.windows)
        self._state = self.windows.state_dict()
        worker = self._worker = _Worker(self.windows, windows, self.num_ahead)
        return self._pass(worker)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next window that the newest pass has not handed out."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As that of the windows. The pass that goes on, if one does, is ended."""
        self.close()
        self.windows.load_state_dict(state)
        self._state = self.windows.state_dict()

    def close(self) -> None:
        """Ends the thread. A pass that is asked for more raises RuntimeError."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _pass(self, worker: _Worker) -> Iterator[Window]:
        try:
            while (made := worker.get()) is not None:
                window, self._state = made
                yield window
        finally:
            worker.close()


class _Worker:
    """A thread that fills a queue with (window, the position behind it), then None or an error."""

    def __init__(self, source: Position, windows: Iterator[Window], num_ahead: int) -> None:
        self._queue: Queue[tuple[Window, dict[str, Any]] | Exception | None] = Queue(num_ahead)
        self._closed = Event()
        self._thread = Thread(target=self._fill, args=(source, windows), daemon=True)
        self._thread.start()

    def get(self) -> tuple[Window, dict[str, Any]] | None:
        while not self._closed.is_set():
            with suppress(Empty):
                made = self._queue.get(timeout=POLL_S)
                if isinstance(made, Exception):
                    raise made
                return made
        raise RuntimeError("this pass was ended by a newer one, by load_state_dict or by close")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _fill(self, source: Position, windows: Iterator[Window]) -> None:
        try:
            for window in windows:
                self._put((window, source.state_dict()))
                if self._closed.is_set():
                    return
            self._put(None)
        except Exception as error:  # whatever it is, it belongs to the one who asked for windows
            self._put(error)

    def _put(self, made: tuple[Window, dict[str, Any]] | Exception | None) -> None:
        while not self._closed.is_set():
            with suppress(Full):
                self._queue.put(made, timeout=POLL_S)
                return
