"""Wrong and right ways to say what a token predicts."""

from __future__ import annotations

import torch

from harness import benign, fault
from reference.data.tokenizer import ByteTokenizer
from reference.window import NO_TARGET

LABELS = "m1_labels::"
ORACLE = [f"{LABELS}test_oracle", f"{LABELS}test_gradient", f"{LABELS}test_chain"]


def shifted_once_more(labels_BT):
    """The labels one place to the left; the last place has none."""
    later_BT = torch.full_like(labels_BT, NO_TARGET)
    later_BT[:, :-1] = labels_BT[:, 1:]
    return later_BT


@fault(
    role="make_labels",
    caught_by=[*ORACLE, f"{LABELS}test_definition", "m1_packing::test_every_token_once"],
    seen_in="huggingface/transformers#47394, PR#37830",
)
def shifts_twice(reference):
    """Labels are the token after the next: shifted here and again in the loss."""

    def make_labels(input_ids_BT, documents_BT, policy):
        return shifted_once_more(reference.make_labels(input_ids_BT, documents_BT, policy))

    return make_labels


@fault(
    role="token_nll",
    caught_by=ORACLE,
    seen_in="huggingface/transformers#47394",
)
def loss_shifts_again(reference):
    """The loss flattens rows and shifts, although the labels are shifted already."""

    def token_nll(hidden_MD, weight_VD, labels_M):
        return reference.token_nll(hidden_MD[:-1], weight_VD, labels_M[1:])

    return token_nll


@fault(
    role="make_labels",
    caught_by=[f"{LABELS}test_rows", f"{LABELS}test_definition[across]"],
    seen_in="huggingface/transformers#47394",
)
def flattens_then_shifts(reference):
    """A row's last target is the first token of the next row."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, policy)
        if documents_BT is None or policy == "across":
            labels_BT[:-1, -1] = input_ids_BT[1:, 0]
        return labels_BT

    return make_labels


@fault(
    role="make_labels",
    caught_by=[
        *ORACLE,
        f"{LABELS}test_definition",
        f"{LABELS}test_end_of_document",
        "m2_descent::test_language",
        "m2_descent::test_random_tokens",
    ],
    seen_in="huggingface/transformers#27517",
)
def does_not_shift(reference):
    """A token is asked for itself: the loss falls to 0 and the model learns to copy its input."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, policy)
        return input_ids_BT.masked_fill(labels_BT == NO_TARGET, NO_TARGET)

    return make_labels


@fault(
    role="make_labels",
    caught_by=[f"{LABELS}test_end_of_document", "m1_packing::test_ends"],
    seen_in="huggingface/transformers#23530, huggingface/trl#976",
)
def masks_eos_as_padding(reference):
    """Padding is found by its id, which is EOS, so no end is ever a target."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, policy)
        return labels_BT.masked_fill(labels_BT == ByteTokenizer.eos, NO_TARGET)

    return make_labels


@fault(
    role="make_labels",
    caught_by=[
        f"{LABELS}test_oracle[inside]",
        f"{LABELS}test_definition[inside]",
        f"{LABELS}test_gradient",
        f"{LABELS}test_chain",
        "m1_packing::test_every_token_once",
    ],
    seen_in="pytorch/torchtitan PR#4075, meta-pytorch/torchtune#1177, alex-hh/profam PR#504",
)
def predicts_the_next_document(reference):
    """The last token of a document has the first of the next as its target, whatever the policy."""

    def make_labels(input_ids_BT, documents_BT, policy):
        return reference.make_labels(input_ids_BT, documents_BT, "across")

    return make_labels


@fault(
    role="make_labels",
    caught_by=[
        f"{LABELS}test_oracle",
        f"{LABELS}test_definition",
        f"{LABELS}test_chain",
        "m1_packing::test_document_numbers",
    ],
    seen_in="own",
)
def padding_is_a_document(reference):
    """Padding predicts padding: its id is taken for one more document."""

    def make_labels(input_ids_BT, documents_BT, policy):
        return reference.make_labels(input_ids_BT, documents_BT + 1, policy)

    return make_labels


@fault(
    role="make_labels",
    caught_by=[
        f"{LABELS}test_oracle[inside]",
        f"{LABELS}test_definition[inside]",
        f"{LABELS}test_gradient",
        f"{LABELS}test_chain",
        "m1_packing::test_every_token_once",
    ],
    seen_in="own",
)
def masks_the_wrong_side(reference):
    """The mask is a place late: a document's last token predicts, its first does not."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, "across")
        if policy == "inside" and documents_BT is not None:
            is_first_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
            labels_BT[:, 1:].masked_fill_(is_first_BT, NO_TARGET)
        return labels_BT

    return make_labels


@fault(
    role="make_labels",
    caught_by=[f"{LABELS}test_rows", f"{LABELS}test_definition[across]"],
    seen_in="own",
)
def wraps_the_row(reference):
    """The last token of a row is asked for the row's first: rolled, not shifted."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, policy)
        if documents_BT is None or policy == "across":
            labels_BT[:, -1] = input_ids_BT[:, 0]
        return labels_BT

    return make_labels


@fault(
    role="make_labels",
    caught_by=[f"{LABELS}test_definition", f"{LABELS}test_oracle", f"{LABELS}test_chain"],
    seen_in="own",
)
def no_target_is_token_zero(reference):
    """What should have no target is asked for token 0."""

    def make_labels(input_ids_BT, documents_BT, policy):
        labels_BT = reference.make_labels(input_ids_BT, documents_BT, policy)
        return labels_BT.masked_fill(labels_BT == NO_TARGET, 0)

    return make_labels


@fault(
    role="make_labels",
    caught_by="m2_descent::test_descent",
    seen_in="own",
)
def labels_of_another_row(reference):
    """Inputs and labels are shuffled apart: nothing in a row predicts its labels."""

    def make_labels(input_ids_BT, documents_BT, policy):
        return reference.make_labels(input_ids_BT, documents_BT, policy).roll(1, 0)

    return make_labels


@benign(
    role="make_labels",
    accepted_by=[
        f"{LABELS}test_oracle",
        f"{LABELS}test_definition",
        f"{LABELS}test_rows",
        f"{LABELS}test_end_of_document",
        f"{LABELS}test_gradient",
        f"{LABELS}test_chain",
        "m1_packing::test_every_token_once",
        "m1_packing::test_across",
    ],
    because="rolled and masked says the same as shifted and filled",
)
def rolled_and_masked(reference):
    """Rolls the tokens to the left and masks whatever has another document, or padding, there."""

    def make_labels(input_ids_BT, documents_BT, policy):
        if documents_BT is None:
            documents_BT = torch.zeros_like(input_ids_BT)
        following_BT = documents_BT.roll(-1, 1)
        following_BT[:, -1:] = -1
        is_target_BT = torch.minimum(documents_BT, following_BT) >= 0
        if policy == "inside":
            is_target_BT = is_target_BT & (following_BT == documents_BT)
        return torch.where(is_target_BT, input_ids_BT.roll(-1, 1), NO_TARGET)

    return make_labels


@benign(
    role="make_labels",
    accepted_by=[
        f"{LABELS}test_oracle",
        f"{LABELS}test_definition",
        f"{LABELS}test_rows",
        f"{LABELS}test_end_of_document",
        f"{LABELS}test_gradient",
    ],
    because="one place at a time, as one would by hand",
)
def one_place_at_a_time(reference):
    """Walks over the rows in a loop and appends a label for each token."""

    def make_labels(input_ids_BT, documents_BT, policy):
        rows = input_ids_BT.tolist()
        owners = [[0] * len(r) for r in rows] if documents_BT is None else documents_BT.tolist()
        labels = []
        for row, owner in zip(rows, owners, strict=True):
            labels.append([NO_TARGET] * len(row))
            for place in range(len(row) - 1):
                joined = policy == "across" or owner[place] == owner[place + 1]
                if joined and owner[place] >= 0 and owner[place + 1] >= 0:
                    labels[-1][place] = row[place + 1]
        return torch.tensor(labels, device=input_ids_BT.device).view(input_ids_BT.shape)

    return make_labels
