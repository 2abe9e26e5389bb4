"""Wrong and right ways to apply a packing policy."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness import benign, fault
from reference.data.pack import Rows
from reference.loss import NO_TARGET
from reference.window import Microbatch

POLICY = "m1_boundaries::test_policy"
WRAP = "m1_boundaries::test_wrapped_tail"
LARGE = "m1_boundaries::test_large_numbers"
ACCOUNT = "m1_boundaries::test_account"


def under(reference, **words):
    """An apply_policy under another policy than the declared one."""

    def apply_policy(rows, policy, eos, make_labels):
        return reference.apply_policy(rows, replace(policy, **words), eos, make_labels)

    return apply_policy


def changed(reference, change):
    """An apply_policy whose result is changed by `change(microbatch, rows, policy, eos)`."""

    def apply_policy(rows, policy, eos, make_labels):
        read = reference.apply_policy(rows, policy, eos, make_labels)
        return replace(read, **change(read, rows, policy, eos))

    return apply_policy


@fault(
    role="apply_policy",
    caught_by=[POLICY, ACCOUNT],
    seen_in="huggingface/transformers#23530, huggingface/trl#976",
)
def never_asks_for_the_end(reference):
    """EOS is masked as if it were padding, although it was to be predicted."""
    return under(reference, eos="ignore")


@fault(role="apply_policy", caught_by=[POLICY, ACCOUNT], seen_in="own")
def masks_what_follows_the_end(reference):
    """With eos "ignore" the target after an EOS is masked, and the EOS itself is learnt."""

    def one_late(read, rows, policy, eos):
        if policy.eos == "predict":
            return {}
        labels = torch.where(read.labels < 0, rows.tokens[:, 1:], read.labels)
        labels[(read.input_ids == eos) | (rows.documents[:, 1:] < 0)] = NO_TARGET
        return {"labels": labels}

    return changed(reference, one_late)


@fault(
    role="apply_policy",
    caught_by=[POLICY, ACCOUNT],
    seen_in="pytorch/torchtitan PR#4075, meta-pytorch/torchtune#1177, alex-hh/profam PR#504",
)
def predicts_the_next_document_undeclared(reference):
    """The last token of a document is trained to predict the first of the next, undeclared."""
    return under(reference, boundary="predict")


@fault(role="apply_policy", caught_by=[POLICY, ACCOUNT], seen_in="own")
def never_predicts_the_next_document(reference):
    """Boundary targets that were declared are left out."""
    return under(reference, boundary="ignore")


@fault(
    role="apply_policy",
    caught_by=POLICY,
    seen_in="huggingface/transformers PR#46634, huggingface/nanoVLM#201",
)
def lets_documents_see_each_other(reference):
    """Attention goes across documents although it was to stay within."""
    return under(reference, attention="across")


@fault(role="apply_policy", caught_by=POLICY, seen_in="own")
def keeps_documents_apart_unasked(reference):
    """Attention stays within documents although it was to go across."""
    return under(reference, attention="within")


@fault(role="apply_policy", caught_by=POLICY, seen_in="own")
def shows_the_padding(reference):
    """With attention across documents, padding is a document like all others."""

    def one_document(read, rows, policy, eos):
        return {"documents": read.documents * 0 if policy.attention == "across" else read.documents}

    return changed(reference, one_document)


@fault(
    role="apply_policy",
    caught_by=POLICY,
    seen_in="huggingface/nanoVLM#201, PR#204",
)
def counts_positions_through(reference):
    """Positions run on over documents although they were to restart."""
    return under(reference, positions="continue")


@fault(role="apply_policy", caught_by=POLICY, seen_in="own")
def restarts_positions_unasked(reference):
    """Positions restart with each document although they were to continue."""
    return under(reference, positions="restart")


@fault(role="apply_policy", caught_by=[POLICY, ACCOUNT], seen_in="own")
def asks_nothing_of_the_last_input(reference):
    """Labels are made of the inputs alone: a window's last target is lost."""

    def without_last(read, rows, policy, eos):
        labels = read.labels.clone()
        labels[:, -1] = NO_TARGET
        return {"labels": labels}

    return changed(reference, without_last)


@fault(role="pack", caught_by=[WRAP, ACCOUNT], seen_in="own")
def pads_instead_of_going_round(reference):
    """The tail is padded although it was to be filled from the beginning."""

    def pack(documents, row_tokens, tail):
        return reference.pack(documents, row_tokens, "pad" if tail == "wrap" else tail)

    return pack


@fault(role="pack", caught_by=WRAP, seen_in="own")
def joins_the_end_to_the_beginning(reference):
    """Documents that come again keep their numbers: a single one is continued by itself."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        if tail != "wrap":
            return rows
        return Rows(rows.tokens, rows.documents % len(documents), rows.positions)

    return pack


@fault(role="pack", caught_by=WRAP, seen_in="own")
def fills_up_with_the_last_document(reference):
    """The tail is filled with the last document's tokens again, not with the first ones'."""

    def pack(documents, row_tokens, tail):
        if tail != "wrap":
            return reference.pack(documents, row_tokens, tail)
        padded = reference.pack(documents, row_tokens, "pad")
        wrapped = reference.pack(documents, row_tokens, "wrap")
        return Rows(padded.tokens, wrapped.documents, wrapped.positions)

    return pack


@fault(role="pack", caught_by=LARGE, seen_in="alasdairforsythe/tokenmonster#23")
def numbers_documents_in_16_bits(reference):
    """Document 65536 has the number of the first."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        return Rows(rows.tokens, rows.documents % 2**16, rows.positions)

    return pack


@fault(role="pack", caught_by=LARGE, seen_in="facebookresearch/fairseq#3765")
def counts_positions_in_16_bits(reference):
    """The token after 65536 others of its document is the first again."""

    def pack(documents, row_tokens, tail):
        rows = reference.pack(documents, row_tokens, tail)
        return Rows(rows.tokens, rows.documents, rows.positions % 2**16)

    return pack


@benign(
    role="apply_policy",
    accepted_by=[POLICY, ACCOUNT],
    because="labels can be made of the documents directly, without make_labels",
)
def labels_from_the_documents(reference):
    """Shifts the tokens itself and masks what the policy leaves out."""

    def apply_policy(rows, policy, eos, make_labels):
        here, following = rows.documents[:, :-1], rows.documents[:, 1:]
        is_target = (here >= 0) & (following >= 0)
        if policy.boundary == "ignore":
            is_target &= here == following
        if policy.eos == "ignore":
            is_target &= rows.tokens[:, 1:] != eos
        read = reference.apply_policy(rows, policy, eos, make_labels)
        labels = torch.where(is_target, rows.tokens[:, 1:], NO_TARGET)
        return Microbatch(read.input_ids, labels, read.positions, read.documents)

    return apply_policy
