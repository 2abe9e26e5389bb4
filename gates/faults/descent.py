"""Leaks and failures that only training shows, on text whose entropy is known."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from harness import benign, fault

LANGUAGE = "m2_descent::test_language"
RANDOM = "m2_descent::test_random_tokens"
DESCENT = "m2_descent::test_descent"


def attention_with(is_seen):
    """Attention in which query t sees key s of its own document where is_seen(t - s)."""

    def attention(q_BTNH, k_BTKH, v_BTKH, documents_BT):
        group = q_BTNH.shape[2] // k_BTKH.shape[2]
        places = torch.arange(q_BTNH.shape[1], device=q_BTNH.device)
        mask_BTT = is_seen(places[:, None] - places[None, :])[None]
        if documents_BT is not None:
            mask_BTT = mask_BTT & (documents_BT[:, :, None] == documents_BT[:, None, :])
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.repeat_interleave(group, 2).transpose(1, 2),
            v_BTKH.repeat_interleave(group, 2).transpose(1, 2),
            attn_mask=mask_BTT[:, None],
        )
        return out_BNTH.transpose(1, 2)

    return attention


@fault(role="attention", caught_by=[LANGUAGE, RANDOM], seen_in="huggingface/transformers#48745")
def sees_the_future(reference):
    """No causal mask: every token sees the whole document."""
    return attention_with(lambda distance: distance == distance)


@fault(role="attention", caught_by=[LANGUAGE, RANDOM], seen_in="own")
def sees_one_ahead(reference):
    """The causal mask is one place late: a token sees the one that it is to predict."""
    return attention_with(lambda distance: distance >= -1)


@fault(
    role="attention",
    caught_by=f"{RANDOM}[repeated]",
    seen_in="alex-hh/profam#495, DeepOpt-com/WrinkleFree-Monorepo#53, huggingface/nanoVLM#201",
)
def sees_other_documents(reference):
    """Causal, but over the borders of documents: copies what stands earlier in the row."""

    def attention(q_BTNH, k_BTKH, v_BTKH, documents_BT):
        return reference.attention(q_BTNH, k_BTKH, v_BTKH, None)

    return attention


@fault(role="attention", caught_by=LANGUAGE, seen_in="own")
def forgets_after_twelve(reference):
    """A token sees itself and the eleven before: enough for words, not to recall."""
    return attention_with(lambda distance: (distance >= 0) & (distance < 12))


@fault(role="build_model", caught_by=f"{RANDOM}[fresh]", seen_in="own")
def embeds_the_next_token(reference):
    """A mixing of neighbours before the first layer reaches one place into the future."""

    def build_model(config, stack):
        model = reference.build_model(config, stack)
        model.embed_tokens.register_forward_hook(
            lambda module, inputs, embedded_BTD: embedded_BTD + embedded_BTD.roll(-1, 1)
        )
        return model

    return build_model


@fault(role="evaluate", caught_by=LANGUAGE, seen_in="own")
def means_as_sums(reference):
    """A document's mean loss is given out as its sum."""

    def evaluate(model, windows):
        scores = reference.evaluate(model, windows)
        per_document = {
            document: replace(score, nats=score.nats / score.num_tokens)
            for document, score in scores.per_document.items()
        }
        return replace(scores, per_document=per_document)

    return evaluate


@fault(role="train", caught_by=LANGUAGE, seen_in="own")
def trains_on_one_window(reference):
    """The data iterator begins anew at each update: the first window is learnt by heart."""

    def train(config, stack, windows, settings, **options):
        return reference.train(config, stack, [windows[0]] * len(windows), settings, **options)

    return train


@benign(
    role="attention",
    accepted_by=[LANGUAGE, RANDOM, DESCENT],
    because="the library's attention with the same mask",
)
def library_attention(reference):
    """torch's scaled_dot_product_attention under the causal mask inside documents."""
    return attention_with(lambda distance: distance >= 0)
