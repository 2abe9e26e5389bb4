"""An evaluation refuses to divide by what it does not know."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import preset
from reference.evaluate import Evaluation, bits_per_byte, evaluate, perplexity
from reference.model import build_model
from reference.stack import ROLES
from reference.window import Microbatch, Window

STACK = SimpleNamespace(**ROLES)


def tiny():
    config = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=1)
    return build_model(config, STACK)


def window(num_bytes=8, documents=True):
    ids = torch.arange(8).view(2, 4)
    owners = torch.tensor([[3] * 4, [5] * 4], dtype=torch.int32) if documents else None
    return Window((Microbatch(ids, ids, torch.arange(4).expand(2, 4), owners, num_bytes),))


def test_the_numbers_of_the_book():
    assert bits_per_byte(2.3, 4) == pytest.approx(0.8295, abs=5e-5)
    assert perplexity(9.0, 3) == pytest.approx(math.exp(3))
    assert perplexity(2 * 710.0, 2) == math.inf  # a run that diverged is told, not a traceback
    assert math.isnan(perplexity(math.nan, 2))


@pytest.mark.parametrize("mean", [perplexity, bits_per_byte])
def test_a_mean_of_nothing_is_refused(mean):
    with pytest.raises(ValueError, match="at least one"):
        mean(0.0, 0)


def test_unknown_bytes_give_no_bits_per_byte():
    with pytest.raises(ValueError, match="num_bytes"):
        _ = Evaluation(1.0, 1).bits_per_byte


def test_one_microbatch_without_bytes_makes_them_unknown():
    score = evaluate(tiny(), [window(8), window(None), window(8)])
    assert score.num_bytes is None and score.num_tokens == 24


def test_no_window_scores_nothing():
    score = evaluate(tiny(), [])
    assert (score.nats, score.num_tokens, score.num_bytes) == (0.0, 0, 0)
    with pytest.raises(ValueError, match="at least one token"):
        _ = score.perplexity


def test_rows_without_documents_are_in_the_total_only():
    score = evaluate(tiny(), [window(documents=False)])
    assert score.num_tokens == 8 and score.per_document == {}


def test_documents_add_up_over_windows():
    score = evaluate(tiny(), [window(), window()])
    assert {key: part.num_tokens for key, part in score.per_document.items()} == {3: 8, 5: 8}


def test_the_mode_comes_back_after_an_error():
    model = tiny().train()
    ids = torch.full((1, 2), 256)
    bad = Window((Microbatch(ids, torch.full_like(ids, 999), torch.arange(2)[None]),))
    with pytest.raises(ValueError, match="label"):
        evaluate(model, [bad])
    assert model.training
