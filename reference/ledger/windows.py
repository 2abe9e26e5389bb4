"""Windows: how a number of tokens becomes optimizer updates, and who reads which row.

    window = context x rows x microbatches x ranks    tokens an update
    updates = ceil(total / window)

The last window is seldom full. A plan says what it does: "trim" supervises only what is left of
the total; "overshoot" runs it in full and passes the total by `overshoot_tokens`. Integers only:
a token count does not fit a float.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

LastWindow = Literal["trim", "overshoot"]


@dataclass(frozen=True)
class WindowPlan:
    """The updates of a run. Made by `plan_windows`, which checks the numbers."""

    total_tokens: int
    context_tokens: int
    num_rows: int  # a microbatch on a rank
    num_microbatches: int  # a window on a rank
    num_ranks: int
    last_window: LastWindow
    num_updates: int
    remainder_tokens: int  # of the total, in the last window: 1 to window_tokens
    overshoot_tokens: int  # beyond the total if every window is full

    @property
    def window_rows(self) -> int:
        """Rows of a full window over all ranks."""
        return self.num_rows * self.num_microbatches * self.num_ranks

    @property
    def window_tokens(self) -> int:
        """Tokens of a full window over all ranks."""
        return self.context_tokens * self.window_rows

    @property
    def last_window_tokens(self) -> int:
        """Tokens the last update trains on, as declared by `last_window`."""
        return self.remainder_tokens if self.last_window == "trim" else self.window_tokens

    @property
    def planned_tokens(self) -> int:
        """Tokens over all updates: the total, plus the overshoot if that was declared."""
        return self.total_tokens + (0 if self.last_window == "trim" else self.overshoot_tokens)

    def sizes(self) -> Iterator[int]:
        """Tokens of each update in order; they sum to `planned_tokens`."""
        for _ in range(self.num_updates - 1):
            yield self.window_tokens
        yield self.last_window_tokens


def plan_windows(
    total_tokens: int,
    context_tokens: int,
    num_rows: int,
    num_microbatches: int,
    num_ranks: int,
    last_window: LastWindow,
) -> WindowPlan:
    """The windows in which `total_tokens` are trained on, the last one as `last_window` says.

    Raises:
        ValueError: a number that is no integer of at least 1, or another `last_window`.
    """
    numbers = {
        "total_tokens": total_tokens,
        "context_tokens": context_tokens,
        "num_rows": num_rows,
        "num_microbatches": num_microbatches,
        "num_ranks": num_ranks,
    }
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
    if last_window not in ("trim", "overshoot"):
        raise ValueError(f'last_window must be "trim" or "overshoot", got {last_window!r}')
    window_tokens = context_tokens * num_rows * num_microbatches * num_ranks
    num_updates = -(-total_tokens // window_tokens)
    return WindowPlan(
        **numbers,
        last_window=last_window,
        num_updates=num_updates,
        remainder_tokens=total_tokens - (num_updates - 1) * window_tokens,
        overshoot_tokens=num_updates * window_tokens - total_tokens,
    )


def window_rows(plan: WindowPlan, update: int, rank: int, microbatch: int) -> range:
    """The rows, counted through the whole run, that a rank reads in one microbatch of an update.

    Row r = ((update x microbatches + microbatch) x ranks + rank) x rows + i. Over all ranks and
    microbatches an update reads `plan.window_rows` successive rows, each once, and the run reads
    ceil(planned_tokens / context_tokens) rows: ranges past that end are cut, even to nothing.

    Raises:
        ValueError: an update (from 0), rank or microbatch that the plan does not have.
    """
    limits = {
        "update": (update, plan.num_updates),
        "rank": (rank, plan.num_ranks),
        "microbatch": (microbatch, plan.num_microbatches),
    }
    for name, (index, count) in limits.items():
        if not 0 <= index < count:
            raise ValueError(f"the plan has {count} of {name}, numbered from 0; got {index}")
    end = -(-plan.planned_tokens // plan.context_tokens)
    place = (update * plan.num_microbatches + microbatch) * plan.num_ranks + rank
    start = place * plan.num_rows
    return range(min(start, end), min(start + plan.num_rows, end))


def count_targets(document_lengths: Sequence[int], policy: Literal["inside", "across"]) -> int:
    """Supervised targets of documents that stand one behind the other in one row.

    "inside": the next token of the same document, sum of (length - 1). "across": the next token
    of the row whoever it belongs to, total - 1. The policy belongs beside the count.

    Raises:
        ValueError: a document without tokens, or another policy.
    """
    if any(length < 1 for length in document_lengths):
        raise ValueError(f"a document has at least 1 token, got lengths {list(document_lengths)}")
    if policy == "inside":
        return sum(length - 1 for length in document_lengths)
    if policy == "across":
        return max(sum(document_lengths) - 1, 0)
    raise ValueError(f'policy must be "inside" or "across", got {policy!r}')
