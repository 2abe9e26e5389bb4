"""Folders of open weights that gates write and read by themselves, without the roles on trial."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gates import probes
from reference.config import DecoderConfig

# H is not D / N, query heads share key/value heads, and no value is a library's default.
QWEN2 = replace(probes.DECODER, rope_theta=5e5, norm_epsilon=1e-5, max_positions=128)
LLAMA = replace(QWEN2, qkv_bias=False, tied_head=False, num_kv_heads=4, head_width=10)
CONFIGS = {"qwen2": QWEN2, "llama": LLAMA}
MODEL_CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def published_fields(config: DecoderConfig) -> dict[str, Any]:
    """A config.json as such models are published with: Qwen2 in the older spelling of RoPE."""
    family = "qwen2" if config.qkv_bias else "llama"
    old, new = (
        {"rope_theta": config.rope_theta, "use_sliding_window": False, "sliding_window": 64},
        {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}},
    )
    return {
        "architectures": [MODEL_CLASSES[family]],
        "model_type": family,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.model_width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "initializer_range": config.initializer_std,
        "eos_token_id": 2,
        **(old if family == "qwen2" else new),
    }


def shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """The shape of every published tensor, a tied head left out, in the model's order."""
    with torch.device("meta"):
        state = probes.REFERENCE.build_model(config, probes.REFERENCE).state_dict()
    found = {published_name(name): tensor.shape for name, tensor in state.items()}
    if config.tied_head:
        del found[HEAD]
    return found


def random_tensors(
    config: DecoderConfig, rng: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random weights under their published names. Small embeddings, so that epsilon counts."""
    tensors = {}
    for name, shape in shapes(config).items():
        std = 0.02 if name == EMBEDDING else 0.2
        center = 1.0 if name.endswith("norm.weight") else 0.0
        values = center + std * torch.randn(shape, generator=rng, dtype=torch.float64)
        tensors[name] = values.to(dtype)
    return tensors


def published_name(name: str) -> str:
    """The published name of the model's parameter `name`."""
    return name if name == HEAD else f"model.{name}"


def write(
    directory: Path, fields: dict[str, Any], tensors: dict[str, Tensor], num_shards: int = 1
) -> Path:
    """A folder as it is published. Shards take the tensors in turn, out of the model's order."""
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = list(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read(directory: Path) -> dict[str, Tensor]:
    """Every stored tensor, file by file, whatever an index says."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_file(file)
    return found


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    from safetensors.torch import load_file

    return load_file(file)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """What a model holds, under published names, on the CPU; a tied head under both names."""
    return {
        published_name(name): tensor.detach().cpu() for name, tensor in model.state_dict().items()
    }


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Names that are in one only, or whose tensors are not the same bits in the same dtype."""
    same = {
        name
        for name in got.keys() & want.keys()
        if got[name].dtype == want[name].dtype and torch.equal(got[name], want[name])
    }
    return sorted((got.keys() | want.keys()) - same)


def with_head(config: DecoderConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state: a tied head stands in it under both names."""
    return {**tensors, HEAD: tensors[EMBEDDING]} if config.tied_head else tensors


def reference_model(config: DecoderConfig, tensors: dict[str, Tensor]) -> nn.Module:
    """The reference model with these weights in float32 on the CPU."""
    model = probes.REFERENCE.build_model(config, probes.REFERENCE)
    model.load_state_dict(
        {name.removeprefix("model."): t.float() for name, t in with_head(config, tensors).items()}
    )
    return model


def outcome(word: str, function: Callable[..., Any], *arguments: Any) -> str:
    """How a call ended: "refused, naming {word}", "accepted", or what else was raised."""
    try:
        function(*arguments)
    except ValueError as error:
        return f"refused, naming {word}" if word in str(error) else f"ValueError: {error}"
    except Exception as error:  # what a candidate raises is a result here, and it is reported
        return f"{type(error).__name__}: {error}"
    return "accepted"
