"""config.json: what it means, what comes back, what is refused by name."""

from dataclasses import replace

import pytest
import torch

from reference.config import PRESETS, DecoderConfig, preset
from reference.hf.config import decoder_config, hf_config

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "sliding_window": 32768,
    "max_window_layers": 24,
    "use_sliding_window": False,
    "use_mrope": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "transformers_version": "4.40.1",
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}


def test_the_published_fields_of_qwen_mean_the_preset():
    want = replace(preset("qwen2.5-0.5b"), tokenizer_vocabulary=None)
    assert decoder_config(QWEN) == want


def test_both_spellings_of_theta_are_read():
    assert decoder_config(LLAMA).rope_theta == 1e5
    assert decoder_config({**QWEN, "rope_scaling": None}).rope_theta == 1e6
    assert decoder_config({**LLAMA, "rope_theta": 1e5}).rope_theta == 1e5
    with pytest.raises(ValueError, match="rope_theta twice, and differently"):
        decoder_config({**LLAMA, "rope_theta": 1e4})


def test_what_is_left_out_means_what_it_means_to_transformers():
    sizes = {name: LLAMA[name] for name in LLAMA if name.startswith(("model", "vocab", "hidden"))}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 9}
    config = decoder_config({**sizes, "max_position_embeddings": 128})
    assert config == DecoderConfig(49152, 576, 64, 2, 9, 9, 64, 128, tied_head=False)
    from transformers import LlamaConfig

    theirs = LlamaConfig(**sizes)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.norm_epsilon == theirs.rms_norm_eps
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_width == theirs.head_dim
    assert config.tied_head == theirs.tie_word_embeddings


@pytest.mark.parametrize("name", [name for name in PRESETS if "chargpt" not in name])
def test_a_configuration_comes_back_from_its_fields(name):
    config = replace(preset(name), tokenizer_vocabulary=None)
    assert decoder_config(hf_config(config, torch.bfloat16, eos_token_id=3)) == config


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "plan-1.15b"])
def test_transformers_reads_our_fields_as_we_do(name):
    from transformers import AutoConfig

    config = replace(preset(name), tokenizer_vocabulary=None, head_width=32, rope_theta=5e5)
    fields = hf_config(config, torch.bfloat16, eos_token_id=3)
    theirs = AutoConfig.for_model(**fields)
    assert theirs.dtype == torch.bfloat16
    assert theirs.eos_token_id == 3
    assert decoder_config(theirs.to_dict()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("architectures", ["Qwen2ForSequenceClassification"]),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_scaling", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("attention_dropout", 0.1),
        ("quantization_config", {"quant_method": "awq"}),
        ("pretraining_tp", 2),
        ("final_logit_softcapping", 30.0),
        ("num_local_experts", 8),
    ],
)
def test_what_is_not_implemented_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError) as error:
        decoder_config({**QWEN, field: value})
    assert field in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("field", "value"), [("attention_bias", True), ("sliding_window", 4096)])
def test_llama_with_a_bias_on_every_projection_or_a_window_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} {value}"):
        decoder_config({**LLAMA, field: value})


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_key_value_heads"])
def test_sizes_are_not_guessed(field):
    fields = {name: value for name, value in QWEN.items() if name != field}
    with pytest.raises(ValueError, match=f"config.json has no {field}"):
        decoder_config(fields)


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 0), ("hidden_size", "896"), ("vocab_size", 1.5)]
)
def test_sizes_that_are_no_counts_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} {value!r}; it must be a whole number"):
        decoder_config({**QWEN, field: value})


def test_rope_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="rope_scaling 'linear'"):
        decoder_config({**QWEN, "rope_scaling": "linear"})


def test_an_odd_head_width_is_refused():
    with pytest.raises(ValueError, match="head_width must be even"):
        decoder_config({**QWEN, "head_dim": 63})
    with pytest.raises(ValueError, match="add head_dim"):
        decoder_config({**QWEN, "hidden_size": 897})


def test_shapes_that_cannot_be_exported_are_refused():
    config = replace(preset("plan-1.15b"), model_width=2050)
    with pytest.raises(ValueError, match="multiple of num_attention_heads"):
        hf_config(config, torch.float32)
    with pytest.raises(ValueError, match="only a DecoderConfig"):
        hf_config(preset("chargpt-smoke"), torch.float32)
