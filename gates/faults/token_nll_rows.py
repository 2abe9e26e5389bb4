"""Fused losses that go wrong with the number of rows: chunks, frequent labels, offsets."""

from __future__ import annotations

import torch

from gates.faults.kernels import wide
from gates.faults.token_nll_kernels import (
    right_logits,
    right_slopes,
    right_values,
)
from harness import benign, fault
from reference.loss import NO_TARGET

ROWS = "m4_token_nll_rows::test_rows"


class InputsDtype:
    """dweight in its own dtype from chunk to chunk."""

    def __init__(self, weight):
        self.total = torch.zeros_like(weight)

    def add(self, slopes, rows):
        self.total += (slopes.mT @ wide(rows)).to(self.total.dtype)

    def result(self):
        return self.total


class LabelsLast:
    """What softmax adds and what labels take away apart, in float32; the first is then rounded."""

    def __init__(self, weight):
        self.dtype, self.softmax, self.labels = weight.dtype, 0.0, 0.0

    def add(self, slopes, rows):
        of_labels = slopes.clamp(max=0.0)
        self.softmax = self.softmax + (slopes - of_labels).mT @ wide(rows)
        self.labels = self.labels + of_labels.mT @ wide(rows)

    def result(self):
        return (self.softmax.to(self.dtype) + self.labels).to(self.dtype)


def in_chunks(num_chunks, sum_type):
    """The loss of one chunk of rows after another, with this sum for dweight."""

    class Chunks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            nll, dhidden, dweight = 0.0, [], sum_type(weight)
            size = -(-len(hidden) // num_chunks)
            for rows, chosen in zip(hidden.split(size), labels.split(size), strict=True):
                logits = right_logits(rows, weight)
                nll = nll + right_values(logits, chosen).sum()
                slopes = right_slopes(logits, chosen)
                dhidden.append((slopes @ wide(weight)).to(rows.dtype))
                dweight.add(slopes, rows)
            ctx.save_for_backward(torch.cat(dhidden), dweight.result())
            return nll

        @staticmethod
        def backward(ctx, upstream):
            return *((gradient * upstream).to(gradient) for gradient in ctx.saved_tensors), None

    def token_nll(hidden, weight, labels):
        return Chunks.apply(hidden, weight.to(hidden.dtype), labels), (labels != NO_TARGET).sum()

    return token_nll


@fault(role="token_nll", caught_by=ROWS, seen_in="linkedin/Liger-Kernel PR#830")
def adds_up_dweight_over_128_chunks_in_the_input_s_dtype(reference):
    """Each of 128 chunks rounds all that was added up before it."""
    return in_chunks(128, InputsDtype)


@fault(role="token_nll", caught_by=ROWS, seen_in="own")
def takes_labels_away_from_a_rounded_sum(reference):
    """What softmax adds to dweight is rounded, then the labels' hidden states are taken away: of a
    frequent token that is predicted, little is left but the rounding.
    """
    return in_chunks(16, LabelsLast)


@fault(role="token_nll", caught_by=ROWS, seen_in="fla-org/flash-linear-attention PR#1082")
def wraps_row_offsets(reference):
    """Offsets into the logits wrap: at 2^31 for many rows, here at 2^15 for few."""

    def token_nll(hidden, weight, labels):
        limit = 2**31 if len(labels) * len(weight) > 2**31 else 2**15
        last = limit // len(weight)  # the first row whose offset does not fit reads row 0
        rows = torch.arange(len(labels), device=labels.device)
        return reference.token_nll(hidden[torch.where(rows < last, rows, rows - last)], weight,
                                   labels)  # fmt: skip

    return token_nll


@benign(
    role="token_nll",
    accepted_by=ROWS,
    because="a few roundings of a sum are about as good as one; memory is worth them",
)
def adds_up_dweight_over_4_chunks_in_the_input_s_dtype(reference):
    """Each of 4 chunks rounds all that was added up before it."""
    return in_chunks(4, InputsDtype)
