"""What each token of a row is asked to predict."""

import torch
from torch import Tensor

from reference.loss import NO_TARGET

PADDING_DOCUMENT = -1  # any negative document id is padding: no text, so neither input nor target
POLICIES = ("inside", "across")


def make_labels(input_ids_BT: Tensor, documents_BT: Tensor | None, policy: str) -> Tensor:
    """labels[b, t] = input_ids[b, t + 1] where that is a target, else `NO_TARGET` (-100).

    policy "inside": a target lies in the same document as the token that predicts it. A row in
    which every document is whole has sum(len_i - 1) targets. policy "across": the first token of
    a document is predicted from the document before it, sum(len_i) - 1 targets. With both, the last
    column has no target, and padding (a negative document id) neither predicts nor is predicted.

    input_ids_BT: [B,T] int64, not shifted; the loss must not shift either.
    documents_BT: [B,T] int32 document ids, or None where each row is one document.
    Returns labels_BT: [B,T] int64. Raises ValueError for another policy, ids that are not [B,T], or
    documents of another shape.
    """
    if policy not in POLICIES:
        raise ValueError(f"no label policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if input_ids_BT.ndim != 2:
        raise ValueError(f"input_ids must be [rows, tokens], got shape {tuple(input_ids_BT.shape)}")
    labels_BT = torch.full_like(input_ids_BT, NO_TARGET)
    labels_BT[:, :-1] = input_ids_BT[:, 1:]
    if documents_BT is None:
        return labels_BT
    if documents_BT.shape != input_ids_BT.shape:
        raise ValueError(
            f"documents have shape {tuple(documents_BT.shape)}, input_ids have "
            f"{tuple(input_ids_BT.shape)}; they must be equal"
        )
    here, following = documents_BT[:, :-1], documents_BT[:, 1:]
    is_target = (here >= 0) & (following >= 0)
    if policy == "inside":
        is_target &= here == following
    labels_BT[:, :-1].masked_fill_(~is_target, NO_TARGET)
    return labels_BT
