"""Other right attention kernels: gradients by hand, rounded weights, another memory layout."""

from __future__ import annotations

from gates.faults.attention_kernels import (
    ATTENTION,
    DOCUMENTS,
    SCORES,
    SHAPES,
    SHORT,
    attention_kernel,
    heads_first,
    right_values,
    stored,
    weights_of,
    wide_gradients,
)
from gates.faults.attention_masks import ISOLATION
from harness import benign

EVERY_ATTENTION_GATE = [
    SHAPES,
    DOCUMENTS,
    SCORES,
    SHORT,
    ISOLATION,
    f"{ATTENTION}test_models[rung]",
    "m4_memory::test_layouts[attention]",
    "m4_memory::test_expanded_heads",
    "m4_memory::test_guards[attention]",
    "m4_repeats::test_same_bits[attention]",
]


@benign(role="attention", accepted_by=EVERY_ATTENTION_GATE, because="the formulas of the gradients")
def has_a_backward_by_hand(reference):
    """Forward and backward by hand, weights computed again."""
    return attention_kernel()


@benign(
    role="attention",
    accepted_by=EVERY_ATTENTION_GATE,
    because="a tensor core takes weights in the dtype of the values; their sum stays in float32",
)
def rounds_weights_before_the_second_product(reference):
    """Weights are rounded to the values' dtype once, as flash attention does."""

    def rounded(p, dtype):
        return p.to(dtype).to(p.dtype)

    def values(q, k, v, may_see):
        p = rounded(weights_of(q, k, may_see), v.dtype)
        return (p @ heads_first(v, q.shape[2] // v.shape[2])).transpose(1, 2).to(q.dtype)

    def gradients(q, k, v, may_see, do):
        group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        p, do_ = weights_of(q, k, may_see), heads_first(do)
        dp = do_ @ heads_first(v, group).mT
        ds = rounded(p * (dp - (dp * p).sum(-1, keepdim=True)), q.dtype) * scale
        of_heads = ds @ heads_first(k, group), ds.mT @ heads_first(q), rounded(p, q.dtype).mT @ do_
        return stored(of_heads, q, k)

    return attention_kernel(values, gradients)


@benign(
    role="attention",
    accepted_by=EVERY_ATTENTION_GATE,
    because="an output may lie in memory as it likes (pytorch/pytorch#133671: a false alarm)",
)
def returns_heads_outermost_in_memory(reference):
    """The output is a transposed view."""

    # Not of the reference's output: torch's fused attention on CUDA makes a float32 product of
    # three TF32 ones, which drops the last bit of half of all values, so that o of one key is not
    # v; and it launches no kernel for rows whose stride is not a multiple of 16 bytes.
    def values(q, k, v, may_see):
        o = right_values(q, k, v, may_see)
        return o.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    return attention_kernel(values)


@benign(
    role="attention",
    accepted_by=EVERY_ATTENTION_GATE,
    because="fused attention saves one o, rounded to its dtype (Dao et al. 2022, algorithm 4)",
)
def takes_delta_from_the_rounded_output(reference):
    """Backward: delta = rowsum(o do) of the o that was returned, not sum(p dp) over the keys."""

    def gradients(q, k, v, may_see, do):
        o = right_values(q, k, v, may_see)  # as it was saved
        delta = (heads_first(o) * heads_first(do)).sum(-1, keepdim=True)
        return stored(wide_gradients(q, k, v, may_see, do, delta), q, k)

    return attention_kernel(gradients=gradients)
