"""Other right fused losses: gradients by hand, an online log-sum-exp, slopes as operands."""

from __future__ import annotations

import torch

from gates.faults.kernels import wide
from gates.faults.token_nll_kernels import (
    IGNORED,
    LOGITS,
    PEAKS,
    RUNG,
    SHAPES,
    SUMS,
    loss_kernel,
    right_products,
)
from harness import benign
from reference.loss import NO_TARGET

EVERY_LOSS_GATE = [
    SHAPES,
    LOGITS,
    PEAKS,
    IGNORED,
    SUMS,
    RUNG,
    "m4_memory::test_layouts[token_nll]",
    "m4_memory::test_guards[token_nll]",
    "m4_repeats::test_same_bits[token_nll]",
]


@benign(role="token_nll", accepted_by=EVERY_LOSS_GATE, because="the formulas of the gradients")
def has_gradients_by_hand(reference):
    """Softmax less one-hot, times the weight and the hidden states."""
    return loss_kernel()


@benign(
    role="token_nll",
    accepted_by=EVERY_LOSS_GATE,
    because="a running maximum and sum over blocks of columns, and sums over chunks of rows",
)
def never_holds_all_logits(reference):
    """Blocks of 32 columns in chunks of 16 rows, with an online log-sum-exp."""

    def values(logits, labels):
        largest = logits[:, :1]
        total = torch.zeros_like(largest)
        for block in logits.split(32, dim=1):
            new = torch.maximum(largest, block.amax(-1, keepdim=True))
            total = total * (largest - new).exp() + (block - new).exp().sum(-1, keepdim=True)
            largest = new
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])
        nll = torch.where(labels[:, None] != NO_TARGET, largest + total.log() - chosen, 0.0)
        return torch.stack([rows.sum() for rows in nll.split(16)])

    def products(slopes, hidden, weight, upstream):
        dhidden, _ = right_products(slopes, hidden, weight, upstream)
        parts = zip(slopes.split(16), hidden.split(16), strict=True)
        total = sum(part.mT @ wide(rows) for part, rows in parts)
        return dhidden, (total * upstream).to(weight.dtype)

    return loss_kernel(values=values, products=products)


@benign(
    role="token_nll",
    accepted_by=[*EVERY_LOSS_GATE],
    because="slopes are operands of tensor cores: rounded once, after a softmax of 32-bit logits",
)
def rounds_slopes_to_the_input_s_dtype(reference):
    """d nll / d logits passes through the dtype of the hidden states."""

    def products(slopes, hidden, weight, upstream):
        narrow = slopes.to(hidden.dtype).to(slopes.dtype)
        return right_products(narrow, hidden, weight, upstream)

    return loss_kernel(products=products)
