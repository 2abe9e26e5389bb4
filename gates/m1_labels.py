"""M1. A label is the next token of the same document, and nothing else is a label."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from harness import gate
from reference.data.tokenizer import ByteTokenizer
from reference.window import NO_TARGET

# One-hot logits of 30 give the right token exp(30) against 1: a loss of V e-30 or of 30 nats.
LOGIT = 30.0
RIGHT = "the oracle knows the answer: (V - 1) exp(-30) nats, under float32's rounding"
WRONG = "another token than the one the oracle names costs 30 nats, to float32's rounding"
# Document lengths of each row, empty ones and rows without text among them.
ROWS = st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=3)


def rows_of_documents(lengths, num_padding, device):
    """Rows that hold documents of these lengths, then padding; no token occurs twice."""
    owners, number = [], 0
    for row in lengths:
        owners.append([])
        for length in row:
            owners[-1] += [number] * length
            number += 1
    num_tokens = max(1, max(map(len, owners)) + num_padding)
    padded = [row + [-1] * (num_tokens - len(row)) for row in owners]
    documents_BT = torch.tensor(padded, dtype=torch.int32).reshape(len(owners), num_tokens)
    tokens_BT = torch.arange(documents_BT.numel()).view(documents_BT.shape)
    return tokens_BT.to(device), documents_BT.to(device)


def defined_labels(tokens_BT, documents_BT, policy):
    """The labels, one place at a time: the next token, if it is of a document and may be asked."""
    labels = []
    for row, owners in zip(tokens_BT.tolist(), documents_BT.tolist(), strict=True):
        for place in range(len(row)):
            here, following = owners[place], [*owners, -1][place + 1]
            joined = here == following or policy == "across"
            is_target = min(here, following) >= 0 and joined
            labels.append(row[place + 1] if is_target else NO_TARGET)
    return torch.tensor(labels, device=tokens_BT.device).view(tokens_BT.shape)


def number_of_targets(lengths, policy):
    """sum(len_i - 1) over documents, or over rows where documents predict one another."""
    wholes = [length for row in lengths for length in row]
    if policy == "across":
        wholes = [sum(row) for row in lengths]
    return sum(max(length - 1, 0) for length in wholes)


def oracle_nats(stack, named_BT, labels_BT):
    """Nats a target and the number of targets, under logits that are one-hot on `named_BT`."""
    weight_VD = torch.eye(named_BT.numel(), device=named_BT.device)
    hidden_MD = LOGIT * weight_VD[named_BT.flatten()]
    nll_sum, num_tokens = stack.token_nll(hidden_MD, weight_VD, labels_BT.flatten())
    return float(nll_sum) / max(int(num_tokens), 1), int(num_tokens)


@gate(
    claim="one-hot logits on the next token lose nothing; on this token or the one after, all",
    roles=["make_labels", "token_nll"],
    not_claimed="that the model sees only what stands before (m1_causality)",
    source="huggingface/transformers#47394, #27517: shifted twice, and not at all; at the initial "
    "loss ln V both look right",
)
@pytest.mark.parametrize("policy", ["inside", "across"])
def test_oracle(stack, policy, device, check, for_all):
    @for_all(lengths=ROWS, num_padding=st.integers(1, 3), max_examples=60)
    def _(lengths, num_padding):
        tokens_BT, documents_BT = rows_of_documents(lengths, num_padding, device)
        labels_BT = stack.make_labels(tokens_BT, documents_BT, policy)
        answers_BT = defined_labels(tokens_BT, documents_BT, policy)
        answers_BT = torch.where(answers_BT == NO_TARGET, tokens_BT, answers_BT)
        right, count = oracle_nats(stack, answers_BT, labels_BT)
        check("nats, oracle of the next token", right, at_most=1e-5, because=RIGHT)
        check(
            "targets that are missing or too many",
            abs(count - number_of_targets(lengths, policy)),
            equal=0,
            because=f"policy {policy!r}: sum(len - 1) over "
            + ("documents" if policy == "inside" else "rows"),
        )
        if count:
            copied, _ = oracle_nats(stack, tokens_BT, labels_BT)
            check("nats, oracle of this token", copied, at_least=LOGIT - 1e-3, because=WRONG)
            late, _ = oracle_nats(stack, tokens_BT.roll(-2, 1), labels_BT)
            check("nats, oracle of the token after", late, at_least=LOGIT - 1e-3, because=WRONG)


@gate(
    claim="labels are the definition, place by place, for documents of any length",
    roles=["make_labels"],
    not_claimed="which policy a corpus wants",
    source="pytorch/torchtitan PR#4075: the last token of a document predicts the next document",
)
@pytest.mark.parametrize("policy", ["inside", "across"])
def test_definition(stack, policy, device, check, for_all):
    @for_all(lengths=ROWS, num_padding=st.integers(0, 3), max_examples=60)
    def _(lengths, num_padding):
        tokens_BT, documents_BT = rows_of_documents(lengths, num_padding, device)
        labels_BT = stack.make_labels(tokens_BT, documents_BT, policy)
        check("shape", list(labels_BT.shape), equal=list(tokens_BT.shape), because="a label each")
        check("dtype", str(labels_BT.dtype), equal="torch.int64", because="labels are token ids")
        padding = int((labels_BT[documents_BT < 0] != NO_TARGET).sum())
        check("targets asked of padding", padding, equal=0, because="padding predicts nothing")
        wrong = int((labels_BT != defined_labels(tokens_BT, documents_BT, policy)).sum())
        check("labels that differ from the definition", wrong, equal=0, because="integers, exact")


@gate(
    claim="without document ids a row is one document: B (T - 1) targets, none from another row",
    roles=["make_labels"],
    not_claimed="rows with padding, which need ids",
    source="huggingface/transformers#47394: flattened before the shift, a row's last target comes "
    "from the next row; 23 targets instead of 21",
)
@pytest.mark.parametrize("policy", ["inside", "across"])
def test_rows(stack, policy, device, check):
    tokens_BT = torch.arange(3 * 8, device=device).view(3, 8)
    labels_BT = stack.make_labels(tokens_BT, None, policy)
    is_target_BT = labels_BT != NO_TARGET
    check("targets", int(is_target_BT.sum()), equal=21, because="3 rows of 8 - 1")
    crossing = int((labels_BT // 8 != tokens_BT // 8)[is_target_BT].sum())
    check("targets from another row", crossing, equal=0, because="rows are independent")


@gate(
    claim="the end of every document that is there is learnt, once",
    roles=["make_labels"],
    not_claimed="documents that are cut (m1_packing)",
    source="huggingface/transformers#23530, huggingface/trl#976: padding is masked by its id, "
    "which is EOS, and generation never stops",
)
def test_end_of_document(stack, device, check, for_all):
    tokenizer = ByteTokenizer()

    @for_all(texts=st.lists(st.binary(max_size=5), min_size=1, max_size=5), max_examples=40)
    def _(texts):
        encoded = [*tokenizer.encode_documents(texts), torch.full((3,), tokenizer.eos)]  # padding
        ids = [*range(len(texts)), -1]
        owners = [i for i, tokens in zip(ids, encoded, strict=True) for _ in tokens]
        labels_BT = stack.make_labels(
            torch.cat(encoded)[None].to(device),
            torch.tensor([owners], dtype=torch.int32, device=device),
            "inside",
        )
        check(
            "supervised EOS - documents with text",
            int((labels_BT == tokenizer.eos).sum()) - sum(map(bool, texts)),
            equal=0,
            because="one EOS ends each; an empty text is EOS alone, which nothing predicts",
        )


@gate(
    claim="d loss / d logits[t] is negative at token t + 1 and nowhere else",
    roles=["make_labels", "token_nll"],
    not_claimed="its size (m2_accumulation)",
    source="huggingface/transformers PR#37830: inputs shifted right and labels left",
)
def test_gradient(stack, device, check, for_all):
    @for_all(lengths=ROWS, max_examples=30)
    def _(lengths):
        tokens_BT, documents_BT = rows_of_documents(lengths, 1, device)
        labels_BT = stack.make_labels(tokens_BT, documents_BT, "inside")
        identity_VD = torch.eye(tokens_BT.numel(), device=device)
        logits_MV = torch.zeros_like(identity_VD, requires_grad=True)
        stack.token_nll(logits_MV, identity_VD, labels_BT.flatten())[0].backward()
        pulled_MV = logits_MV.grad < 0
        answers_M = defined_labels(tokens_BT, documents_BT, "inside").flatten()
        wanted_MV = torch.zeros_like(pulled_MV)
        is_target_M = answers_M != NO_TARGET
        wanted_MV[is_target_M, answers_M[is_target_M]] = True
        because = "the gradient is softmax - one-hot(target): negative at the target alone"
        missing, extra = (wanted_MV & ~pulled_MV).sum(), (pulled_MV & ~wanted_MV).sum()
        check("next tokens that are not pulled up", int(missing), equal=0, because=because)
        check("other tokens that are pulled up", int(extra), equal=0, because=because)


class Successor(nn.Module):
    """A model that answers token + 1, with certainty. In these documents that is the next token."""

    def __init__(self, vocabulary_size, stack):
        super().__init__()
        self.lm_head = nn.Linear(vocabulary_size, vocabulary_size, bias=False)
        self.lm_head.weight.data = torch.eye(vocabulary_size)
        self.stack = stack

    def forward(self, input_ids_BT, positions_BT=None, documents_BT=None):
        identity_VD = self.lm_head.weight.detach()
        return LOGIT * identity_VD[(input_ids_BT + 1) % len(identity_VD)]


@gate(
    claim="from documents to the loss nothing shifts a second time: an oracle model loses nothing",
    roles=["pack", "batches", "make_labels", "token_nll", "accumulate", "evaluate"],
    not_claimed="the order of the windows",
    source="huggingface/transformers#47394: the loss began to shift what was shifted already",
)
def test_chain(stack, device, check, for_all):
    model = Successor(13, stack).to(device)

    @for_all(
        lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
        row_tokens=st.integers(1, 8),
        max_examples=25,
    )
    def _(lengths, row_tokens):
        documents = [(torch.arange(n) + 5 * i) % 13 for i, n in enumerate(lengths)]
        rows = stack.pack(documents, row_tokens, "pad")
        order = torch.arange(len(rows.tokens))
        windows = [
            window.to(device)
            for window in stack.batches(rows, order, stack.make_labels, "inside", 2, 2)
        ]
        want = sum(max(n - 1, 0) for n in lengths)
        stats = [stack.accumulate(model, window, None) for window in windows]
        scores = stack.evaluate(model, windows)
        for name, nats, count in (
            ("accumulate", sum(s.nll_sum for s in stats), sum(s.num_targets for s in stats)),
            ("evaluate", scores.nats, scores.num_tokens),
        ):
            check(f"{name}: targets - sum(len - 1)", count - want, equal=0, because="each once")
            check(f"{name}: nats a target", nats / max(want, 1), at_most=1e-5, because=RIGHT)
        counts = {i: s.num_tokens for i, s in scores.per_document.items()}
        check(
            "documents whose count is not len - 1",
            sum(counts.get(i, 0) != max(n - 1, 0) for i, n in enumerate(lengths)),
            equal=0,
            because="a document's id goes with its tokens to the score",
        )
