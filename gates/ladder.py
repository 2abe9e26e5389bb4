"""The rungs: the model scales of ``--rung``, from a laptop's to many cards'."""

from dataclasses import replace

from reference.config import DecoderConfig, preset

RUNGS = {
    "L0": preset("bytes-0.09m"),
    "L1": DecoderConfig(  # 123.6M parameters, the shape of GPT-2 small with the parts of Qwen2
        vocabulary_size=50304,
        model_width=768,
        feed_forward_width=2048,
        num_layers=12,
        num_query_heads=12,
        num_kv_heads=12,
        head_width=64,
        max_positions=2048,
    ),
    "L2": preset("qwen2.5-0.5b"),
    "L3": preset("qwen2.5-1.5b"),
    "L4": preset("qwen2.5-7b"),
}


def config(rung: str) -> DecoderConfig:
    """The full model of a rung."""
    return RUNGS[rung]


def operator_configs(rung: str) -> tuple[DecoderConfig, ...]:
    """The models whose shapes an operator of this rung meets: L3 has those of 3B, too."""
    return (config(rung), preset("qwen2.5-3b")) if rung == "L3" else (config(rung),)


def one_layer(rung: str) -> DecoderConfig:
    """One layer of the rung's true width over a small vocabulary: bounded memory anywhere."""
    full = config(rung)
    return replace(
        full,
        num_layers=1,
        vocabulary_size=min(full.vocabulary_size, 1024),
        tokenizer_vocabulary=None,
    )
