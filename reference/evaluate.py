"""Held-out likelihood: sums over tokens and bytes, and by document. Never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reference.loss import NO_TARGET
from reference.window import Microbatch, Window


@dataclass(frozen=True)
class DocumentScore:
    """Summed negative log-likelihood of one document's targets in nats, and their number."""

    nats: float
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """Sums over a held-out set.

    nats: summed negative log-likelihood; num_tokens: targets; num_bytes: of the raw text, or None
    where a microbatch does not say; per_document: by document id, for rows that carry ids.
    """

    nats: float
    num_tokens: int
    num_bytes: int | None = None
    per_document: dict[int, DocumentScore] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(nats / num_tokens)."""
        return perplexity(self.nats, self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """nats / (num_bytes ln 2). Raises ValueError when the bytes are not known."""
        if self.num_bytes is None:
            raise ValueError("bits per byte needs num_bytes in every Microbatch that is evaluated")
        return bits_per_byte(self.nats, self.num_bytes)


def perplexity(nats: float, num_tokens: int) -> float:
    """exp(sum of nats / number of tokens), infinity above 709 nats a token, where float64 ends.

    Raises ValueError without tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"perplexity needs at least one token, got {num_tokens}")
    try:
        return math.exp(nats / num_tokens)
    except OverflowError:
        return math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """sum of nats / (number of bytes of the raw text * ln 2). Raises ValueError without bytes."""
    if num_bytes < 1:
        raise ValueError(f"bits per byte needs at least one byte, got {num_bytes}")
    return nats / (num_bytes * math.log(2))


def evaluate(model: Any, windows: Iterable[Window]) -> Evaluation:
    """Scores windows in evaluation mode without gradients; the model's mode is put back.

    nats and num_tokens are sums over all targets, so the result does not depend on how rows are
    put into microbatches. num_bytes is the sum of what the microbatches carry from the raw text;
    it is never derived from tokens. A document may be spread over rows, microbatches and windows:
    its id joins them.

    model: from build_model (it brings `stack.token_nll` and `lm_head.weight`).
    """
    was_training = model.training
    model.eval()
    nats, num_tokens = 0.0, 0
    num_bytes: int | None = 0
    per_document: dict[int, DocumentScore] = {}
    try:
        with torch.no_grad():
            for window in windows:
                for microbatch in window.microbatches:
                    for document, score in _scores(model, microbatch):
                        nats += score.nats
                        num_tokens += score.num_tokens
                        if document is not None:
                            old = per_document.get(document, DocumentScore(0.0, 0))
                            per_document[document] = DocumentScore(
                                old.nats + score.nats, old.num_tokens + score.num_tokens
                            )
                    if num_bytes is not None and microbatch.num_bytes is not None:
                        num_bytes += microbatch.num_bytes
                    else:
                        num_bytes = None
    finally:
        model.train(was_training)
    return Evaluation(nats, num_tokens, num_bytes, per_document)


def _scores(model: Any, microbatch: Microbatch) -> list[tuple[int | None, DocumentScore]]:
    """The score of each document that has targets here; of all targets where there are no ids."""
    hidden_BTD = model(microbatch.input_ids, microbatch.positions, microbatch.documents)
    hidden_MD, labels_M = hidden_BTD.flatten(0, 1), microbatch.labels.flatten()
    if microbatch.documents is None:
        return [(None, _score(model, hidden_MD, labels_M))]
    documents_M = microbatch.documents.flatten()
    scores: list[tuple[int | None, DocumentScore]] = []
    for document in torch.unique(documents_M[labels_M != NO_TARGET]).tolist():
        chosen = documents_M == document
        scores.append((document, _score(model, hidden_MD[chosen], labels_M[chosen])))
    return scores


def _score(model: Any, hidden_MD: Tensor, labels_M: Tensor) -> DocumentScore:
    nll, num_tokens = model.stack.token_nll(hidden_MD, model.lm_head.weight, labels_M)
    return DocumentScore(float(nll), int(num_tokens))
