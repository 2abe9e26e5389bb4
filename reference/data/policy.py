"""What documents become when they are cut into windows: one object for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from reference.data.labels import PADDING_DOCUMENT
from reference.data.pack import Rows
from reference.loss import NO_TARGET
from reference.window import Microbatch

MakeLabels = Callable[[Tensor, Tensor | None, str], Tensor]

CHOICES = {
    "attention": ("within", "across"),
    "eos": ("predict", "ignore"),
    "boundary": ("ignore", "predict"),
    "tail": ("drop", "pad", "wrap"),
    "positions": ("restart", "continue"),
}


@dataclass(frozen=True)
class PackingPolicy:
    """How a stream of documents, each ended by EOS, becomes windows of `window_tokens` inputs.

    attention: "within" a document, or "across" all that stands before in the window.
    eos: whether the EOS that ends a document is a target.
    boundary: whether a document's first token is a target of the token before it, which belongs to
    another document.
    tail: a last window that is not full is left out ("drop"), filled with padding ("pad"), or with
    the tokens from the stream's beginning ("wrap"), which are then trained on twice.
    positions: "restart" at 0 with each document, or "continue" through the window.

    Raises ValueError for window_tokens < 1 and for another word, listing those there are.
    """

    window_tokens: int
    attention: str = "within"
    eos: str = "predict"
    boundary: str = "ignore"
    tail: str = "drop"
    positions: str = "restart"

    def __post_init__(self) -> None:
        if type(self.window_tokens) is not int or self.window_tokens < 1:
            raise ValueError(
                f"window_tokens must be a whole number >= 1, got {self.window_tokens!r}"
            )
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise ValueError(
                    f"no {name} policy {getattr(self, name)!r}; choose one of {', '.join(words)}"
                )

    @property
    def labels(self) -> str:
        """The policy of `make_labels`: "inside" a document or "across" documents."""
        return "inside" if self.boundary == "ignore" else "across"

    def for_evaluation(self) -> PackingPolicy:
        """The same with tail "pad": nothing that is held out is left out or scored twice."""
        return replace(self, tail="pad")

    def to_json(self) -> dict[str, int | str]:
        """As a manifest holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PackingPolicy:
        """The inverse of to_json. ValueError for a missing or an unknown field."""
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            raise ValueError(
                f"a packing policy has {', '.join(sorted(names))}; got {', '.join(sorted(values))}"
            )
        return cls(**values)


def apply_policy(
    rows: Rows, policy: PackingPolicy, eos: int, make_labels: MakeLabels
) -> Microbatch:
    """Rows [B,T+1] as a model reads them: input_ids, labels, positions, documents, each [B,T].

    labels[b, t] is tokens[b, t + 1] where the policy makes it a target, else `NO_TARGET`.
    documents, which attention keeps to: as in the rows, or with attention "across" 0 for all text
    and `PADDING_DOCUMENT` for padding. eos: the token that ends each document.

    Raises ValueError for rows of another length than the policy's.
    """
    num_tokens = rows.tokens.shape[1] - 1
    if num_tokens != policy.window_tokens:
        raise ValueError(
            f"rows of {num_tokens} inputs, the policy has windows of {policy.window_tokens}"
        )
    labels = make_labels(rows.tokens, rows.documents, policy.labels)[:, :-1]
    if policy.eos == "ignore":
        labels = labels.masked_fill(labels == eos, NO_TARGET)
    documents, positions = rows.documents[:, :-1], rows.positions[:, :-1]
    if policy.attention == "across":
        documents = documents.clamp(PADDING_DOCUMENT, 0)
    if policy.positions == "continue":
        positions = torch.arange(num_tokens).expand(positions.shape)
    return Microbatch(rows.tokens[:, :-1], labels, positions, documents)
