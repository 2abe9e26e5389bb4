"""Models whose products keep fewer or more digits than float32, under SmolLM2's real weights."""

from __future__ import annotations

import torch

from gates import outcomes
from gates.faults.linear_kernels import linear_kernel, multiplies_in_tensor_float_32
from gates.faults.token_nll_kernels import loss_kernel, right_products
from harness import benign, fault

GRADIENTS = "m4_pretrained::test_gradients"


@fault(role="linear", caught_by=GRADIENTS, seen_in="own")
def keeps_10_bits_of_float32(reference):
    """TensorFloat-32 left on: activations and weights are rounded before they are multiplied."""
    return multiplies_in_tensor_float_32.build(reference)


@fault(role="token_nll", caught_by=GRADIENTS, seen_in="own")
def adds_up_the_vocabulary_term_by_term(reference):
    """One float32 sum over 49152 tokens in dhidden, without partial sums: 3e-4 of all gradients."""

    def products(slopes, hidden, weight, upstream):
        dhidden = torch.zeros_like(hidden)
        for slope, line in zip(slopes.mT.contiguous(), weight, strict=True):
            dhidden.addcmul_(slope[:, None], line)
        _, dweight = right_products(slopes, hidden, weight, upstream)
        return dhidden * upstream, dweight

    return loss_kernel(products=products)


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
