"""What the ranks of a run tell each other while they save and load.

They talk through the store of their process group and make no collective. So a thread can do it
beside training, with any backend, and a rank that does not come is known by its number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from reference.checkpoint.errors import CheckpointError, MissingRankError
from reference.group import rank_in
from reference.hf.folder import FolderTakenError

DEADLINE_S, POLL_S = 600.0, 0.01
_ERRORS: dict[str, Callable[[str], Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointError, FolderTakenError, MissingRankError, RuntimeError)
}


@dataclass(frozen=True)
class Peers:
    """This rank among the ranks of a run; by default a process that runs alone.

    store: a torch.distributed.Store that all of them share. deadline_s: how long the ranks that
    have come to a place wait there for the others.
    """

    index: int = 0
    world_size: int = 1
    store: Any = None
    deadline_s: float = DEADLINE_S

    def agree(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """[work() of every rank], in rank order, the same list on all of them.

        topic: the place in the program; all ranks come by equal ones in equal order. Results are
        what JSON gives back equal.

        Raises, on all ranks in the same words, the ValueError or OSError of the first rank whose
        work raised one, any other of its exceptions as a RuntimeError, and MissingRankError with
        the ranks that did not come within the deadline. One that comes later is told the same.
        """
        if self.world_size == 1:
            return [work()]
        own_error = None
        try:
            told = {"result": work()}
        except Exception as error:  # whatever it is: the others would wait for this rank
            own_error = error
            told = {"error": _told(error)}
        answers = [json.loads(text) for text in self._exchange(topic, json.dumps(told))]
        for answer in answers:
            if "error" in answer:
                raise _error(*answer["error"]) from own_error
        return [answer["result"] for answer in answers]

    def first(self, topic: str, work: Callable[[], Any]) -> Any:
        """What work() gives on the first rank, which alone does it; the rest as `agree`."""
        return self.agree(topic, work if self.index == 0 else _nothing)[0]

    def _exchange(self, topic: str, message: str) -> list[bytes]:
        attempt = self.store.add(f"{topic}/attempts of {self.index}", 1)
        place = f"{topic}/{attempt}"
        keys = [f"{place}/{index}" for index in range(self.world_size)]
        self.store.set(keys[self.index], message)
        missing = json.dumps(self._missing(keys, f"{place}/missing"))
        # The first to give up, or to have heard all, decides it for all.
        decided = json.loads(self.store.compare_set(f"{place}/missing", "", missing))
        if decided:
            raise MissingRankError(
                f"rank {', '.join(map(str, decided))} of {self.world_size} did not come within "
                f"{self.deadline_s:g} s to: {topic}"
            )
        messages = [self.store.get(key) for key in keys]
        if self.store.add(f"{place}/read", 1) == self.world_size:
            for key in keys:
                self.store.delete_key(key)
        return messages

    def _missing(self, keys: list[str], decided: str) -> list[int]:
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            if self.store.check(keys) or self.store.check([decided]):
                return []
            time.sleep(POLL_S)
        return [index for index, key in enumerate(keys) if not self.store.check([key])]


ALONE = Peers()


def peers_of(group: Any) -> Peers:
    """The ranks of a process group; ALONE for None."""
    if group is None:
        return ALONE
    store = dist.distributed_c10d._get_process_group_store(group)
    return Peers(*rank_in(group), store)


def _nothing() -> None:
    pass


def _told(error: Exception) -> tuple[str, int | None, str]:
    """What `_error` makes the error of again: its kind, number and words."""
    if not isinstance(error, (ValueError, OSError)):
        return "RuntimeError", None, f"{type(error).__name__}: {error}"
    words = str(getattr(error, "strerror", None) or error)
    return type(error).__name__, getattr(error, "errno", None), words


def _error(kind: str, number: int | None, words: str) -> Exception:
    if kind in _ERRORS:
        return _ERRORS[kind](words)
    return ValueError(words) if number is None else OSError(number, words)
