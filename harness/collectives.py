"""The collectives of one rank: which, how many bytes, among how many ranks, in which order."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

KINDS = {  # of the operators that every collective comes through, also those of C++
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
KEY = "BackendSelect"  # the dispatcher passes here on its way to gloo, nccl or hccl, always


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank issued it.

    ``num_bytes`` is what this rank hands in: the whole tensor of an all-reduce, a broadcast or a
    reduce-scatter, the rank's own shard of an all-gather.
    """

    kind: str
    num_bytes: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_bytes:,} bytes among {self.group_size}"


class Collectives:
    """Watches what this process issues, also from within DDP's reducer, FSDP2 and DTensors.

    Each collective is noted before it is issued, in memory and as a line of ``file``, which is
    there to be read when this process is killed. Once a process: it cannot be taken back.
    """

    def __init__(self, file: Path) -> None:
        self.issued: list[Collective] = []  # since the last reset, in their order
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in KINDS:
            note = self._noting(name)
            self._library.impl(name, note, KEY, with_keyset=True)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Count from here."""
        self.issued.clear()

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind since the last reset."""
        return dict(Counter(collective.kind for collective in self.issued))

    @property
    def num_bytes(self) -> dict[str, int]:
        """The bytes that this rank handed in, by kind, since the last reset."""
        totals: Counter[str] = Counter()
        for collective in self.issued:
            totals[collective.kind] += collective.num_bytes
        return dict(totals)

    def _noting(self, name: str) -> Callable[..., Any]:
        """The operator, noting its call and going on to the backend."""
        operator = getattr(torch.ops.c10d, name).default
        arguments = [argument.name for argument in operator._schema.arguments]
        handed_in = next((i for i, arg in enumerate(arguments) if arg.startswith("input")), 0)
        group = arguments.index("process_group")

        def note_and_issue(keys: Any, *args: Any) -> Any:
            kind = KINDS[name]
            num_bytes = sum(x.nbytes for x in _tensors(args[handed_in]) if kind != "barrier")
            self._note(Collective(kind, num_bytes, ProcessGroup.unbox(args[group]).size()))
            return operator.redispatch(keys.remove(getattr(torch._C.DispatchKey, KEY)), *args)

        return note_and_issue

    def _note(self, collective: Collective) -> None:
        self.issued.append(collective)
        os.write(self._file, json.dumps(astuple(collective)).encode() + b"\n")


def read(file: Path) -> list[Collective]:
    """What a rank issued, from its file; a line that its death cut short is left out."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [Collective(*json.loads(line)) for line in lines]


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    else:
        for part in argument:
            yield from _tensors(part)
