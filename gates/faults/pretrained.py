"""Models whose products keep fewer or more digits than float32, under SmolLM2's real weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gates import outcomes
from gates.faults.linear_kernels import linear_kernel, multiplies_in_tensor_float_32
from harness import benign, fault
from reference.loss import NO_TARGET

GRADIENTS = "m4_pretrained::test_gradients"


@fault(role="linear", caught_by=GRADIENTS, seen_in="own")
def keeps_10_bits_of_float32(reference):
    """TensorFloat-32 left on: activations and weights are rounded before they are multiplied."""
    return multiplies_in_tensor_float_32.build(reference)


class LossInOneSum(torch.autograd.Function):
    """Cross-entropy's sum; dhidden adds up one token of the vocabulary after the other."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        logits = hidden @ weight.T
        ctx.save_for_backward(hidden, weight, labels, logits)
        return F.cross_entropy(logits, labels, ignore_index=NO_TARGET, reduction="sum")

    @staticmethod
    def backward(ctx, dnll):
        hidden, weight, labels, logits = ctx.saved_tensors
        ignored = labels == NO_TARGET
        slopes = logits.softmax(-1) - F.one_hot(labels.masked_fill(ignored, 0), len(weight))
        slopes = slopes.masked_fill(ignored[:, None], 0) * dnll
        dhidden = torch.zeros_like(hidden)
        for slope, line in zip(slopes.T.contiguous(), weight, strict=True):
            dhidden.addcmul_(slope[:, None], line)
        return dhidden, slopes.T @ hidden, None


@fault(role="token_nll", caught_by=GRADIENTS, seen_in="own")
def adds_up_the_vocabulary_term_by_term(reference):
    """One float32 sum over 49152 tokens in dhidden, without partial sums: 3e-4 of all gradients."""

    def token_nll(hidden, weight, labels):
        nll = LossInOneSum.apply(hidden, weight.to(hidden.dtype), labels)
        return nll, (labels != NO_TARGET).sum()

    return token_nll


@benign(
    role="linear",
    accepted_by=GRADIENTS,
    because="what rounds less may differ from transformers by all of transformers' error",
)
def multiplies_in_float64(reference):
    """Products and their sums in float64, rounded once."""

    def product(a, b):
        a_, b_ = (x.to(outcomes.place(x.device)).double() for x in (a, b))
        return (a_ @ b_.mT).to(a)

    return linear_kernel(product, product, product)
