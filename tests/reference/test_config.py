"""Configurations refuse what cannot be built, and the presets have the published sizes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import PRESETS, CharGPTConfig, DecoderConfig, preset
from reference.model import build_model
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
DECODER = preset("bytes-0.09m")
CHARGPT = preset("chargpt-smoke")
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "plan-1.15b": 1_147_766_784,
    "bytes-0.09m": 90_496,
    "chargpt-smoke": 62_880,
    "chargpt-default": 10_734_336,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_published_number_of_parameters(name):
    with torch.device("meta"):
        model = build_model(preset(name), STACK)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_the_untied_plan_has_one_more_vocabulary_table():
    with torch.device("meta"):
        model = build_model(replace(preset("plan-1.15b"), tied_head=False), STACK)
    assert sum(p.numel() for p in model.parameters()) == 1_213_302_784


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no preset 'qwen3'; there are bytes-0"):
        preset("qwen3")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocabulary_size", 0),
        ("model_width", -64),
        ("feed_forward_width", 1.5),
        ("num_layers", True),
        ("num_query_heads", "4"),
        ("num_kv_heads", 3),
        ("num_kv_heads", 8),
        ("head_width", 15),
        ("max_positions", 0),
        ("rope_theta", 0.0),
        ("rope_theta", float("nan")),
        ("norm_epsilon", 0.0),
        ("norm_epsilon", float("inf")),
        ("initializer_std", -0.02),
        ("qkv_bias", 1),
        ("tied_head", None),
        ("compute_dtype", torch.int32),
        ("compute_dtype", "bfloat16"),
        ("tokenizer_vocabulary", 258),
        ("tokenizer_vocabulary", 0),
    ],
)
def test_a_decoder_that_cannot_be_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        replace(DECODER, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocabulary_size", 0),
        ("model_width", 0),
        ("num_layers", 0),
        ("num_heads", 5),
        ("max_positions", 0),
        ("norm_epsilon", 0.0),
        ("initializer_std", 0.0),
        ("compute_dtype", torch.float64),
    ],
)
def test_a_chargpt_that_cannot_be_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        replace(CHARGPT, **{field: value})


def test_the_message_tells_what_was_asked():
    with pytest.raises(ValueError, match="num_kv_heads must divide num_query_heads, got 3 and 4"):
        replace(DECODER, num_kv_heads=3)


def test_configurations_are_values():
    assert replace(DECODER) == DECODER
    assert hash(replace(CHARGPT)) == hash(CHARGPT)
    assert isinstance(DECODER, DecoderConfig)
    assert isinstance(CHARGPT, CharGPTConfig)


def test_head_width_of_the_chargpt_is_its_share_of_the_width():
    assert preset("chargpt-default").head_width == 64
