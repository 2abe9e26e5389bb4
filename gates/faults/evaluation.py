"""Wrong and right ways to score held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from harness import benign, fault
from reference.evaluate import DocumentScore, Evaluation
from reference.loss import NO_TARGET
from reference.window import Window

GATE = "m0_evaluation::"
BATCHES = [f"{GATE}test_unequal_batches", f"{GATE}test_any_batches"]


def changing(reference, change):
    """An evaluate that returns change(evaluation, windows)."""

    def evaluate(model, windows):
        windows = list(windows)
        return change(reference.evaluate(model, windows), windows)

    return evaluate


def target_ids(windows):
    for window in windows:
        for microbatch in window.microbatches:
            yield from microbatch.labels[microbatch.labels != NO_TARGET].tolist()


@fault(role="evaluate", caught_by=BATCHES, seen_in="pytorch/torchtitan PR#4167")
def mean_of_batch_means(reference):
    """Averages the means of the windows."""

    def evaluate(model, windows):
        scores = [reference.evaluate(model, [window]) for window in windows]
        mean = sum(s.nats / max(s.num_tokens, 1) for s in scores) / len(scores)
        num_tokens = sum(score.num_tokens for score in scores)
        return Evaluation(mean * num_tokens, num_tokens)

    return evaluate


@fault(role="evaluate", caught_by=BATCHES, seen_in="pytorch/torchtitan PR#2366")
def divides_once_more(reference):
    """Divides the sum by the number of windows, left over from when the loss was a mean."""
    return changing(
        reference, lambda score, windows: replace(score, nats=score.nats / len(windows))
    )


@dataclass(frozen=True)
class MeanOfExponentials(Evaluation):
    token_perplexity: float = math.nan

    @property
    def perplexity(self):
        return self.token_perplexity


@fault(role="evaluate", caught_by=f"{GATE}test_perplexity", seen_in="magenta/magenta PR#239")
def mean_of_exponentials(reference):
    """Exponentiates the loss of every token before averaging."""

    def evaluate(model, windows):
        score, parts = reference.evaluate(model, windows), []
        for window in windows:
            for microbatch in window.microbatches:
                for place in (microbatch.labels != NO_TARGET).nonzero():
                    labels = torch.full_like(microbatch.labels, NO_TARGET)
                    labels[tuple(place)] = microbatch.labels[tuple(place)]
                    one = Window((replace(microbatch, labels=labels),))
                    parts.append(math.exp(reference.evaluate(model, [one]).nats))
        return MeanOfExponentials(
            score.nats,
            score.num_tokens,
            score.num_bytes,
            score.per_document,
            sum(parts) / len(parts),
        )

    return evaluate


@dataclass(frozen=True)
class NatsPerByte(Evaluation):
    @property
    def bits_per_byte(self):
        return self.nats / self.num_bytes


@fault(role="evaluate", caught_by=f"{GATE}test_bits_per_byte", seen_in="own")
def nats_called_bits(reference):
    """Gives nats per byte for bits per byte."""
    return changing(
        reference,
        lambda score, windows: NatsPerByte(
            score.nats, score.num_tokens, score.num_bytes, score.per_document
        ),
    )


@fault(
    role="evaluate",
    caught_by=f"{GATE}test_bytes_of_the_source",
    seen_in="karpathy/nanochat PR#693, karpathy/autoresearch#384",
)
def bytes_of_decoded_tokens(reference):
    """Counts the bytes of every token decoded and encoded again: 3 for a byte that is no text."""

    def num_bytes(score, windows):
        texts = [bytes([i]).decode(errors="replace") for i in target_ids(windows) if i < 256]
        return replace(score, num_bytes=sum(len(text.encode()) for text in texts))

    return changing(reference, num_bytes)


@fault(
    role="evaluate",
    caught_by=f"{GATE}test_bytes_of_the_source",
    seen_in="openai/parameter-golf#897",
)
def spaces_count_twice(reference):
    """Adds a byte for every space, for the marker that stands for it."""

    def num_bytes(score, windows):
        ids = list(target_ids(windows))
        return replace(score, num_bytes=sum(i < 256 for i in ids) + ids.count(32))

    return changing(reference, num_bytes)


@fault(
    role="evaluate",
    caught_by=[f"{GATE}test_bits_per_byte", f"{GATE}test_bytes_of_the_source"],
    seen_in="openai/parameter-golf PR#1271",
)
def bytes_of_a_table(reference):
    """Takes one byte for every target from a table, instead of the size of the source."""
    return changing(reference, lambda score, windows: replace(score, num_bytes=score.num_tokens))


@fault(
    role="evaluate",
    caught_by=[f"{GATE}test_any_batches", f"{GATE}test_unequal_batches"],
    seen_in="own",
)
def counts_positions_as_tokens(reference):
    """Counts every position of a row as a token: padding makes the model look better."""
    return changing(
        reference,
        lambda score, windows: replace(score, num_tokens=sum(w.num_tokens for w in windows)),
    )


@fault(role="evaluate", caught_by=BATCHES, seen_in="own")
def drops_the_last_batch(reference):
    """Drops the last window, as a loader with drop_last does."""

    def evaluate(model, windows):
        windows = list(windows)
        return reference.evaluate(model, windows[:-1] or windows)

    return evaluate


@fault(role="evaluate", caught_by=f"{GATE}test_any_batches", seen_in="own")
def sums_in_bfloat16(reference):
    """Keeps the sum of nats in bfloat16."""
    return changing(
        reference,
        lambda score, windows: replace(score, nats=float(torch.tensor(score.nats).bfloat16())),
    )


@fault(role="evaluate", caught_by=f"{GATE}test_documents", seen_in="own")
def last_part_of_a_document(reference):
    """Keeps the last part of a document that stands in two windows."""

    def evaluate(model, windows):
        windows = list(windows)
        score, parts = reference.evaluate(model, windows), {}
        for window in windows:
            parts |= reference.evaluate(model, [window]).per_document
        return replace(score, per_document=parts)

    return evaluate


@fault(role="evaluate", caught_by=f"{GATE}test_documents", seen_in="own")
def row_goes_to_its_first_document(reference):
    """Gives all nats of a row to the document that the row begins with."""

    def evaluate(model, windows):
        whole = [
            Window(
                tuple(
                    replace(m, documents=m.documents[:, :1].expand_as(m.documents))
                    for m in window.microbatches
                )
            )
            for window in windows
        ]
        return reference.evaluate(model, whole)

    return evaluate


@fault(role="evaluate", caught_by=f"{GATE}test_leaves_no_trace", seen_in="own")
def stays_in_evaluation_mode(reference):
    """Leaves the model in evaluation mode: the training goes on without dropout."""

    def evaluate(model, windows):
        score = reference.evaluate(model, windows)
        model.eval()
        return score

    return evaluate


@fault(role="evaluate", caught_by=f"{GATE}test_leaves_no_trace", seen_in="own")
def scores_in_training_mode(reference):
    """Scores with dropout on."""

    def evaluate(model, windows):
        model.eval = lambda: model.train()
        score = reference.evaluate(model, windows)
        del model.eval
        return score

    return evaluate


# --- right, in another way -------------------------------------------------------------------

ACCEPTED = [
    f"{GATE}test_{name}"
    for name in ("bits_per_byte", "unequal_batches", "perplexity", "bytes_of_the_source",
                 "documents", "any_batches", "leaves_no_trace")
]  # fmt: skip


@benign(role="evaluate", accepted_by=ACCEPTED, because="a sum does not know of batches")
def a_row_at_a_time(reference):
    """Scores row by row and adds the scores up."""

    def evaluate(model, windows):
        nats, num_tokens, num_bytes, documents = 0.0, 0, 0, {}
        for window in windows:
            for m in window.microbatches:
                for index in range(m.num_rows):
                    score = reference.evaluate(model, [Window((m.rows(index, index + 1),))])
                    nats, num_tokens = nats + score.nats, num_tokens + score.num_tokens
                    for key, part in score.per_document.items():
                        old = documents.get(key, DocumentScore(0.0, 0))
                        documents[key] = DocumentScore(
                            old.nats + part.nats, old.num_tokens + part.num_tokens
                        )
                num_bytes += m.num_bytes or 0
        return Evaluation(nats, num_tokens, num_bytes, documents)

    return evaluate


@benign(
    role="evaluate",
    accepted_by=f"{GATE}test_any_batches",
    because="the loss from all logits at once is the same sum",
)
def from_logits(reference):
    """Computes all logits and the library's cross-entropy; no documents."""

    @torch.no_grad()
    def evaluate(model, windows):
        nats, num_tokens = 0.0, 0
        for window in windows:
            for m in window.microbatches:
                hidden = model(m.input_ids, m.positions, m.documents).flatten(0, 1)
                logits = hidden @ model.lm_head.weight.T
                nats += float(F.cross_entropy(logits, m.labels.flatten(), reduction="sum"))
                num_tokens += m.num_targets
        return Evaluation(nats, num_tokens)

    return evaluate
