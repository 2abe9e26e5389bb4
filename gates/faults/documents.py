"""Wrong ways to keep the documents of a row apart."""

from __future__ import annotations

import math

import torch

from gates.faults.attention import attend, visible
from harness import fault

DOCUMENTS = "m1_documents::"
OPERATOR = [f"{DOCUMENTS}test_operator", f"{DOCUMENTS}test_operator_alone"]
MODEL = [f"{DOCUMENTS}test_replaced_document", f"{DOCUMENTS}test_document_alone"]
COPY = f"{DOCUMENTS}test_a_copy_stays_unpredicted"


def with_documents(reference, changed):
    """An attention that is given changed(documents) wherever it is given documents."""

    def attention(q, k, v, documents):
        return reference.attention(q, k, v, None if documents is None else changed(documents))

    return attention


def with_forward(reference, changed):
    """A build_model whose models call changed(forward, ids, positions, documents)."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        forward = model.forward
        model.forward = lambda ids, positions=None, documents=None: changed(
            forward, ids, positions, documents
        )
        return model

    return build_model


@fault(
    role="attention",
    caught_by=[*OPERATOR, *MODEL, COPY],
    seen_in="DeepOpt-com/WrinkleFree-Monorepo#53",
)
def believes_that_restarted_positions_separate(reference):
    """Keeps the plain causal mask: documents see the ones before them."""
    return with_documents(reference, lambda documents: None)


@fault(role="build_model", caught_by=[*MODEL, COPY], seen_in="huggingface/nanoVLM#201")
def hands_on_positions_only(reference):
    """The model restarts positions and forgets to hand the documents to attention."""
    return with_forward(reference, lambda forward, ids, positions, _: forward(ids, positions, None))


@fault(
    role="attention",
    caught_by=[
        "m1_causality::test_operator[scores-1-packed]",
        "m1_causality::test_replaced_future[scores-1-packed]",
        f"{DOCUMENTS}test_ids_are_names",
        f"{DOCUMENTS}test_operator_alone",
    ],
    seen_in="own",
)
def drops_the_causal_flag_with_a_mask(reference):
    """A document mask replaces the causal mask instead of adding to it."""

    def attention(q, k, v, documents):
        if documents is None:
            return reference.attention(q, k, v, None)
        may_see = (documents[:, :, None] == documents[:, None, :])[:, None]
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@fault(role="attention", caught_by=[*OPERATOR, *MODEL, COPY], seen_in="own")
def reads_ids_as_a_padding_mask(reference):
    """Takes documents for an attention mask of ones: it sees all that are not 0."""
    return with_documents(reference, lambda documents: (documents != 0).int())


@fault(role="attention", caught_by=[*OPERATOR, *MODEL], seen_in="huggingface/transformers PR#46634")
def looks_for_documents_in_the_first_row(reference):
    """A row without a boundary switches the document mask of the whole batch off."""

    def attention(q, k, v, documents):
        whole = documents is None or bool((documents[0] == documents[0, 0]).all())
        return reference.attention(q, k, v, None if whole else documents)

    return attention


@fault(role="attention", caught_by=[*OPERATOR, *MODEL], seen_in="own")
def cuts_all_rows_like_the_first(reference):
    """Boundaries are taken from row 0 for the whole batch."""
    return with_documents(reference, lambda documents: documents[:1].expand_as(documents))


@fault(
    role="attention",
    caught_by=[*OPERATOR, f"{DOCUMENTS}test_ids_are_names"],
    seen_in="own",
)
def takes_lengths_in_the_order_of_ids(reference):
    """Cumulative lengths from sorted ids, which are not the order of the documents."""

    def changed(documents):
        rows = []
        for row in documents:
            _, lengths = torch.unique(row, return_counts=True)
            rows.append(torch.arange(len(lengths), device=row.device).repeat_interleave(lengths))
        return torch.stack(rows)

    return with_documents(reference, changed)


@fault(role="attention", caught_by=[*OPERATOR, *MODEL], seen_in="own")
def starts_documents_one_token_late(reference):
    """Off by one: the first token of a document belongs to the one before."""
    return with_documents(
        reference, lambda documents: torch.cat((documents[:, :1], documents[:, :-1]), dim=1)
    )


@fault(role="attention", caught_by=OPERATOR, seen_in="own")
def lets_larger_ids_see_smaller_ones(reference):
    """Compares ids with >= instead of ==."""

    def attention(q, k, v, documents):
        if documents is None:
            return reference.attention(q, k, v, None)
        larger = (documents[:, :, None] >= documents[:, None, :])[:, None]
        may_see = visible(q, None) & larger
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@fault(
    role="attention",
    caught_by=[f"{DOCUMENTS}test_padding", f"{DOCUMENTS}test_ids_are_names"],
    seen_in="pytorch/pytorch#41508",
)
def masks_padding_from_itself(reference):
    """Adds -inf to all scores of id -1: the row of a padding token is NaN."""

    def attention(q, k, v, documents):
        if documents is None:
            return reference.attention(q, k, v, None)
        may_see = visible(q, documents) & (documents != -1)[:, None, None, :]
        bias = torch.zeros(may_see.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill(~may_see, -math.inf)
        return attend(q, k, v, lambda scores: scores + bias)

    return attention


@fault(
    role="attention",
    caught_by=[
        f"{DOCUMENTS}test_ids_are_names",
        f"{DOCUMENTS}test_operator_alone",
        "m1_causality::test_nothing_is_forgotten[packed]",
    ],
    seen_in="own",
)
def takes_id_0_for_padding(reference):
    """Outputs zeros for the document whose id is 0."""

    def attention(q, k, v, documents):
        o = reference.attention(q, k, v, documents)
        return o if documents is None else o * (documents != 0)[..., None, None]

    return attention


@fault(
    role="build_model",
    caught_by=[
        f"{DOCUMENTS}test_document_alone[chargpt]",
        "m1_positions::test_model",
        "m1_model::test_values_and_gradients[chargpt]",
    ],
    seen_in="huggingface/nanoVLM PR#204",
)
def lets_positions_run_on(reference):
    """The model counts positions from the row's start, whatever it is given."""
    return with_forward(reference, lambda forward, ids, _, documents: forward(ids, None, documents))


@fault(
    role="build_model",
    caught_by=f"{DOCUMENTS}test_shapes",
    seen_in="huggingface/transformers PR#44911",
)
def takes_what_it_needs_of_any_shape(reference):
    """Flattens positions and documents and takes the first B * T of them."""

    def changed(forward, ids, positions, documents):
        def fitted(x):
            values = x.flatten().repeat(ids.numel())[: ids.numel()]
            return values.reshape(ids.shape)

        return forward(ids, *(x if x is None else fitted(x) for x in (positions, documents)))

    return with_forward(reference, changed)


def leaking(reference):
    """The reference's attention without its causal mask, inside documents."""

    def attention(q, k, v, documents):
        ids = torch.zeros(q.shape[:2], device=q.device) if documents is None else documents
        may_see = (ids[:, :, None] == ids[:, None, :])[:, None]
        return attend(q, k, v, lambda scores: scores.masked_fill(~may_see, -math.inf))

    return attention


@fault(
    role="build_model",
    caught_by=[
        f"m1_causality::test_layers[{family}-evaluation-{packed}]"
        for family in ("decoder", "chargpt")
        for packed in ("row", "packed")
    ],
    seen_in="huggingface/transformers#48745",
)
def looks_ahead_in_evaluation_mode(reference):
    """One of two code paths lost its causal mask: that of evaluation."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)

        def attention(q, k, v, documents):
            path = stack.attention if model.training else leaking(reference)
            return path(q, k, v, documents)

        for layer in model.layers:
            layer.self_attn.stack = stack.replace({"attention": attention})
        return model

    return build_model


@fault(
    role="build_model",
    caught_by="m1_causality::test_layers",
    seen_in="huggingface/transformers#31673",
)
def looks_ahead_in_every_second_layer(reference):
    """Only the layers in between lost their causal mask."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        for layer in model.layers[1::2]:
            layer.self_attn.stack = stack.replace({"attention": leaking(reference)})
        return model

    return build_model
