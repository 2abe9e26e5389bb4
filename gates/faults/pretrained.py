"""Models whose products keep fewer or more digits than float32, under SmolLM2's real weights."""

from __future__ import annotations

from gates import outcomes
from gates.faults.linear_kernels import linear_kernel, multiplies_in_tensor_float_32
from harness import benign, fault

GRADIENTS = "m4_pretrained::test_gradients"


@fault(role="linear", caught_by=GRADIENTS, seen_in="own")
def keeps_10_bits_of_float32(reference):
    """TensorFloat-32 left on: activations and weights are rounded before they are multiplied."""
    return multiplies_in_tensor_float_32.build(reference)


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
