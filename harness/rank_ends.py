"""How the ranks of a job ended, and the words for it when one did not finish."""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.collectives import Collective, read
from harness.formatting import listing
from harness.rank_frames import program_stack, without_internals
from harness.rank_process import files

NUM_LOG_LINES = 20


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``how``: "finished", "raised" an exception, "died" without a word, or was still "running" when
    the launcher ended it. ``words`` go on after "rank 1 …". ``log`` is a traceback, or the stack
    at the end, and the last lines that the rank printed. ``called``: the roles on trial that it
    called, however it ended.
    """

    index: int
    how: str
    words: str
    collectives: list[Collective]
    log: str = ""
    ended_s: float = float("inf")  # when it raised
    result: Any = None
    called: frozenset[str] = frozenset()

    def __str__(self) -> str:
        num = len(self.collectives)
        issued = f"{num} collective{'s' * (num != 1)}"
        last = f", the last: {self.collectives[-1]}" if num else ""
        first_line, *more = self.words.split("\n")
        return f"rank {self.index} {first_line}{' …' if more else ''}; it issued {issued}{last}"


def read_end(
    folder: Path, index: int, local_index: int, exit_status: int | None, late: bool
) -> RankEnd:
    """The end of a rank, from its files in ``folder`` and from what the launcher saw.

    ``exit_status`` is None unless the launcher saw it fail; ``late`` if the deadline was over.
    """
    own = files(folder, index)
    collectives, printed = read(own["collectives"]), _printed(folder, local_index)
    called = frozenset(own["called"].read_text().splitlines() if own["called"].exists() else ())

    def end(how: str, words: str, log: str = "", **more: Any) -> RankEnd:
        return RankEnd(index, how, words, collectives, log + printed, called=called, **more)

    if own["result"].exists():
        result = torch.load(own["result"], map_location="cpu", weights_only=False)
        return end("finished", "finished", result=result)
    if own["exception"].exists():
        name, text, told, ended_s = pickle.loads(own["exception"].read_bytes())
        return end("raised", f"raised {name}: {text}", told, ended_s=ended_s)
    stack = program_stack(own["stack"].read_text()) if own["stack"].exists() else ""
    if stack:
        return end("running", "was still running when it was ended", stack)
    return end("running", "gave no sign of life") if late else end("died", _death(exit_status))


def _death(exit_status: int | None) -> str:
    if exit_status is None:
        return "ended without a word"
    if exit_status >= 0:
        return f"ended itself with exit status {exit_status}"
    return f"died of signal {-exit_status} ({signal.Signals(-exit_status).name})"


def _printed(folder: Path, local_index: int) -> str:
    """The last lines that a rank of this host printed, from the launcher's files."""
    texts = [file.read_text(errors="replace") for kind in ("stdout", "stderr")
             for file in folder.glob(f"*/attempt_0/{local_index}/{kind}.log")]  # fmt: skip
    lines = without_internals("".join(texts)).splitlines()
    return "".join(f"{line}\n" for line in lines[-NUM_LOG_LINES:])


@dataclass(frozen=True)
class Failure:
    """Why not all ranks finished.

    ``kind``: "died" if any died without a word, else "hung" if the deadline ended them, else
    "raised". ``ranks``: those that died; those that hung with the fewest collectives, for whom
    the others wait; or the one that raised first, with all that raised the same words. ``ends`` has
    every rank, in their order.
    """

    kind: str
    ranks: tuple[int, ...]
    ends: tuple[RankEnd, ...]
    timeout_s: float

    @property
    def fewest(self) -> tuple[int, ...]:
        """The ranks that issued fewer collectives than another one."""
        most = max(len(end.collectives) for end in self.ends)
        return tuple(end.index for end in self.ends if len(end.collectives) < most)

    @property
    def parting(self) -> int | None:
        """The first collective (from 0) at which two ranks issued different ones."""
        issued = zip(*(end.collectives for end in self.ends), strict=False)
        return next((n for n, each in enumerate(issued) if len(set(map(_what, each))) > 1), None)

    def __str__(self) -> str:
        what = {"died": "died", "raised": "raised an exception",
                "hung": f"did not end within {self.timeout_s:g} s"}[self.kind]  # fmt: skip
        lines = [
            f"of {len(self.ends)} ranks, rank {_listed(self.ranks)} {what}",
            *map(str, self.ends),
        ]
        if self.fewest:
            lines.append(f"fewer collectives than the others: rank {_listed(self.fewest)}")
        if self.parting is not None:
            lines.append(f"they parted at collective {self.parting + 1}:")
            lines += [f"rank {end.index}: {end.collectives[self.parting]}" for end in self.ends]
        return "\n".join(lines)

    @property
    def logs(self) -> str:
        """What every rank left: traceback or stack, and its last lines; the same ones once."""
        ranks_by_log: dict[str, list[int]] = {}
        for end in sorted(self.ends, key=lambda end: (end.index not in self.ranks, end.index)):
            if end.log:
                ranks_by_log.setdefault(end.log.rstrip(), []).append(end.index)
        return "\n".join(
            f"--- rank {_listed(ranks)} ---\n{log}" for log, ranks in ranks_by_log.items()
        )


def _what(collective: Collective) -> tuple[str, int]:
    """Its kind, and its bytes where all ranks hand in as many."""
    alike = collective.kind in ("all_reduce", "broadcast", "reduce_scatter")
    return collective.kind, collective.num_bytes if alike else 0


def _listed(ranks: Sequence[int]) -> str:
    return listing([str(rank) for rank in ranks])


def failure_of(ends: Sequence[RankEnd], timeout_s: float, late: bool) -> Failure | None:
    """The failure of a job, or None if every rank finished."""
    if all(end.how == "finished" for end in ends):
        return None
    died = tuple(end.index for end in ends if end.how == "died")
    if died:
        return Failure("died", died, tuple(ends), timeout_s)
    first = min(ends, key=lambda end: end.ended_s)
    if not late:
        same = tuple(end.index for end in ends if _no_numbers(end) == _no_numbers(first))
        return Failure("raised", same, tuple(ends), timeout_s)
    fewest = min(len(end.collectives) for end in ends)
    silent = tuple(end.index for end in ends if len(end.collectives) == fewest)
    return Failure("hung", silent, tuple(ends), timeout_s)


def _no_numbers(end: RankEnd) -> str:
    """Its words without the numbers, which may be a rank's own: its index, a port."""
    return re.sub(r"\d+", "", end.words)


class RanksFailed(RuntimeError):
    """Not all ranks finished; ``failure`` has the details, ``rank_logs`` what the ranks left."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.rank_logs = failure.logs
