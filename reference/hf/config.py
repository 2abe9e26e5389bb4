"""config.json of Qwen2, Qwen2.5 and Llama, read into a DecoderConfig and written from one."""

from collections.abc import Mapping
from typing import Any

import torch

from reference.config import DecoderConfig

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
# What changes the computation and what the reference computes: any other value is refused. A field
# that is not here either has its own reader below or leaves the numbers as they are.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
    "dual_chunk_attention_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The DecoderConfig that the fields of a config.json mean, in transformers' own reading.

    A field that is left out means what it means there (rope_theta 10000, rms_norm_eps 1e-6, an
    untied head); sizes may not be left out. Biases are on q, k and v in qwen2, nowhere in llama.

    Raises ValueError naming the field and its value for a model that the reference does not
    compute: another model_type or activation, scaled or partial RoPE, sliding windows, biases
    elsewhere, dropout, quantized weights.
    """
    model_type = fields.get("model_type")
    if model_type not in ARCHITECTURES:
        raise _refusal("model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
    if fields.get("architectures") not in (None, [], [ARCHITECTURES[model_type]]):
        raise _refusal("architectures", fields["architectures"], [ARCHITECTURES[model_type]])
    for name, computed in _COMPUTED.items():
        if name in fields and fields[name] not in computed:
            raise _refusal(name, fields[name], computed[0])
    if model_type == "llama":
        _refuse_llama_extras(fields)
    _refuse_layer_types(fields)
    missing = [name for name in _SIZES if fields.get(name) is None]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}; the sizes must be there")
    for name in _SIZES:
        if type(fields[name]) is not int or fields[name] < 1:
            raise ValueError(f"config.json has {name} {fields[name]!r}; it must be a whole number "
                             f"of at least 1")  # fmt: skip
    num_query_heads = fields["num_attention_heads"]
    return DecoderConfig(
        vocabulary_size=fields["vocab_size"],
        model_width=fields["hidden_size"],
        feed_forward_width=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_query_heads=num_query_heads,
        num_kv_heads=_num_kv_heads(fields),
        head_width=_head_width(fields),
        max_positions=fields["max_position_embeddings"],
        rope_theta=_rope_theta(fields),
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        qkv_bias=model_type == "qwen2",
        tied_head=fields.get("tie_word_embeddings", False),
        initializer_std=fields.get("initializer_range", 0.02),
    )


def hf_config(
    config: DecoderConfig, dtype: torch.dtype, eos_token_id: int | None = None
) -> dict[str, Any]:
    """The fields of config.json for `config` with weights of `dtype`: Qwen2 with biases on q, k and
    v, else Llama. `decoder_config` reads them back, but for compute_dtype and tokenizer_vocabulary,
    which are not properties of the weights.

    Raises ValueError for a shape that transformers refuses: a Llama whose model_width is not a
    multiple of num_query_heads, or any other family than the decoder.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"only a DecoderConfig has a config.json, got {config!r}")
    model_type = "qwen2" if config.qkv_bias else "llama"
    if model_type == "llama" and config.model_width % config.num_query_heads:
        raise ValueError(
            f"transformers' Llama wants hidden_size to be a multiple of num_attention_heads, got "
            f"model_width {config.model_width} and num_query_heads {config.num_query_heads}"
        )
    fields = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.model_width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_positions,
        # Both spellings: transformers 5 reads the first, older readers the second.
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.initializer_std,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    if model_type == "llama":
        fields |= {"attention_bias": False, "mlp_bias": False}
    return fields


def _num_kv_heads(fields: Mapping[str, Any]) -> Any:
    name = "num_key_value_heads"
    if fields["model_type"] == "qwen2" and name not in fields:
        raise ValueError(f"config.json has no {name}; transformers would take 32 for qwen2")
    value = fields.get(name)
    return fields["num_attention_heads"] if value is None else value


def _head_width(fields: Mapping[str, Any]) -> Any:
    if fields.get("head_dim") is not None:
        return fields["head_dim"]
    width, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    if width % num_heads:
        raise ValueError(
            f"config.json has no head_dim, and hidden_size {width} is not a multiple of "
            f"num_attention_heads {num_heads}; add head_dim"
        )
    return width // num_heads


def _rope_theta(fields: Mapping[str, Any]) -> Any:
    """The one base of all RoPE frequencies, from `rope_parameters` or from older fields."""
    found = [fields["rope_theta"]] if fields.get("rope_theta") is not None else []
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name) or {}
        if not isinstance(rope, dict):
            raise _refusal(name, rope, "an object with a rope_theta")
        kind = rope.get("rope_type", rope.get("type", "default"))
        others = {
            key: value
            for key, value in rope.items()
            if key not in ("rope_theta", "rope_type", "type")
            and not (key == "partial_rotary_factor" and value == 1)
        }
        if kind != "default" or others:
            raise _refusal(name, rope, "the default RoPE: a rope_theta and nothing else")
        if rope.get("rope_theta") is not None:
            found.append(rope["rope_theta"])
    if any(theta != found[0] for theta in found):
        raise ValueError(f"config.json gives rope_theta twice, and differently: {found}")
    return found[0] if found else 1e4


def _refuse_llama_extras(fields: Mapping[str, Any]) -> None:
    if fields.get("attention_bias"):  # transformers puts one on o_proj as well
        raise _refusal("attention_bias", fields["attention_bias"], False)
    if fields.get("sliding_window") is not None:
        raise _refusal("sliding_window", fields["sliding_window"], None)


def _refuse_layer_types(fields: Mapping[str, Any]) -> None:
    layer_types = fields.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _refusal("layer_types", layer_types, "full_attention in every layer")


def _refusal(name: str, value: Any, computed: Any) -> ValueError:
    return ValueError(
        f"config.json has {name} {value!r}, which the reference does not implement; it computes "
        f"{computed if isinstance(computed, str) else repr(computed)}"
    )
