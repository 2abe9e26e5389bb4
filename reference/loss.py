"""The loss of a language model, as a sum and a count and never as a mean."""

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.ops import arithmetic_dtype

NO_TARGET = -100


def token_nll(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over m with a target of -log softmax(hidden_m weight^T)[labels_m], and their number.

    The weight is rounded to hidden's dtype; the logits of these operands and the log-softmax are in
    promote(hidden.dtype, float32) and are not rounded in between. Label -100 is no target: no loss,
    no gradient. Without any target the sum is 0.0 with a gradient of zeros.

    By logsumexp(z) - z[label] of z = logits - max(logits), which adds up a long vocabulary in short
    sums: over 150,000 logits in float32 on a CPU, F.cross_entropy is 60 times as far from float64.

    Returns (nll_sum in nats, float32 or float64; num_tokens, int64), both scalar tensors.
    Raises ValueError on shapes that do not fit or a label outside [0, V) that is not -100.
    """
    if hidden_MD.ndim != 2 or labels_M.shape != hidden_MD.shape[:1]:
        raise ValueError(f"hidden must be [M, D] and labels [M], got {list(hidden_MD.shape)} and "
                         f"{list(labels_M.shape)}")  # fmt: skip
    if weight_VD.ndim != 2 or weight_VD.shape[1] != hidden_MD.shape[1]:
        raise ValueError(f"weight must be [V, {hidden_MD.shape[1]}], got {list(weight_VD.shape)}")
    _require_labels(labels_M, vocabulary_size=weight_VD.shape[0])
    dtype = arithmetic_dtype(hidden_MD.dtype)
    logits_MV = F.linear(hidden_MD.to(dtype), weight_VD.to(hidden_MD.dtype).to(dtype)).to(dtype)
    # The gradient is exp(z - logsumexp(z)), which is rounded at the size of z.
    z_MV = logits_MV - logits_MV.detach().amax(-1, keepdim=True)
    is_target = labels_M != NO_TARGET
    of_label = F.nll_loss(z_MV, labels_M, reduction="none", ignore_index=NO_TARGET)
    nll_M = torch.where(is_target, z_MV.logsumexp(-1), 0.0) + of_label
    return nll_M.sum(), is_target.sum()


def _require_labels(labels_M: Tensor, vocabulary_size: int) -> None:
    if labels_M.is_meta:  # a traced model has shapes and no values
        return
    wrong = (labels_M != NO_TARGET) & ((labels_M < 0) | (labels_M >= vocabulary_size))
    if bool(wrong.any()):
        raise ValueError(
            f"a label must be {NO_TARGET} (no target) or in [0, {vocabulary_size}), got "
            f"{int(labels_M[wrong][0])}; check the tokenizer's vocabulary"
        )
