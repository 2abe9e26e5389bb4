"""Shapes of the two model families, every invariant checked when a configuration is made."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU (the Qwen2 family).

    Widths are in elements, `max_positions` in tokens. Query head n reads key/value head
    n // (num_query_heads // num_kv_heads). `compute_dtype` None computes in the parameters' own
    dtype; torch.bfloat16 or torch.float16 casts weights and activations where they are used, while
    parameters, gradients and optimizer state stay float32. `tokenizer_vocabulary`, if given, is the
    number of ids the tokenizer can produce.

    Raises ValueError naming the field that breaks an invariant.
    """

    vocabulary_size: int
    model_width: int
    feed_forward_width: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_width: int
    max_positions: int
    rope_theta: float = 1e4
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    tied_head: bool = True
    initializer_std: float = 0.02
    compute_dtype: torch.dtype | None = None
    tokenizer_vocabulary: int | None = None

    def __post_init__(self) -> None:
        _require_counts(
            self,
            "vocabulary_size",
            "model_width",
            "feed_forward_width",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_width",
            "max_positions",
        )
        _require_positive(self, "rope_theta", "norm_epsilon", "initializer_std")
        _require_bool(self, "qkv_bias", "tied_head")
        _require_compute_dtype(self.compute_dtype)
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_query_heads, got {self.num_kv_heads} and "
                f"{self.num_query_heads}"
            )
        if self.head_width % 2:
            raise ValueError(
                f"head_width must be even, since RoPE rotates pairs, got {self.head_width}"
            )
        if self.tokenizer_vocabulary is not None:
            _require_counts(self, "tokenizer_vocabulary")
            if self.tokenizer_vocabulary > self.vocabulary_size:
                raise ValueError(
                    f"vocabulary_size {self.vocabulary_size} does not cover tokenizer_vocabulary "
                    f"{self.tokenizer_vocabulary}; raise it to at least that"
                )


@dataclass(frozen=True)
class CharGPTConfig:
    """Shape of the character GPT: learned positions, LayerNorm, GELU, biases, untied head.

    The feed-forward width is 4 * model_width and a head is model_width / num_heads wide.

    Raises ValueError naming the field that breaks an invariant.
    """

    vocabulary_size: int
    model_width: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_epsilon: float = 1e-5
    initializer_std: float = 0.02
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _require_counts(
            self, "vocabulary_size", "model_width", "num_layers", "num_heads", "max_positions"
        )
        _require_positive(self, "norm_epsilon", "initializer_std")
        _require_compute_dtype(self.compute_dtype)
        if self.model_width % self.num_heads:
            raise ValueError(
                f"num_heads must divide model_width, got {self.num_heads} and {self.model_width}"
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head: model_width / num_heads."""
        return self.model_width // self.num_heads


ModelConfig = DecoderConfig | CharGPTConfig


def _require_counts(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{field} must be a positive integer, got {value!r}")


def _require_positive(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{field} must be a finite number above 0, got {value!r}")


def _require_bool(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, bool):
            raise ValueError(f"{field} must be True or False, got {value!r}")


def _require_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(
            "compute_dtype must be None (the parameters' own), torch.bfloat16 or torch.float16, "
            f"got {dtype!r}"
        )


def _qwen2_5(
    width: int, feed_forward: int, layers: int, heads: tuple[int, int], head_width: int,
    *, vocabulary: int = 151936, positions: int = 32768, tied: bool = True,
) -> DecoderConfig:  # fmt: skip
    """A Qwen2.5 shape (the model cards and configuration files of Qwen/Qwen2.5-*)."""
    return DecoderConfig(
        vocabulary_size=vocabulary,
        model_width=width,
        feed_forward_width=feed_forward,
        num_layers=layers,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_width=head_width,
        max_positions=positions,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        qkv_bias=True,
        tied_head=tied,
        tokenizer_vocabulary=151665,
    )


PRESETS: dict[str, DecoderConfig | CharGPTConfig] = {
    "qwen2.5-0.5b": _qwen2_5(896, 4864, 24, (14, 2), 64),
    "qwen2.5-1.5b": _qwen2_5(1536, 8960, 28, (12, 2), 128),
    "qwen2.5-3b": _qwen2_5(2048, 11008, 36, (16, 2), 128),
    "qwen2.5-7b": _qwen2_5(
        3584, 18944, 28, (28, 4), 128, vocabulary=152064, positions=131072, tied=False
    ),
    "plan-1.15b": DecoderConfig(
        vocabulary_size=32000,
        model_width=2048,
        feed_forward_width=5632,
        num_layers=24,
        num_query_heads=16,
        num_kv_heads=4,
        head_width=128,
        max_positions=4096,
    ),
    # 256 bytes and the end of a document: 90,496 parameters.
    "bytes-0.09m": DecoderConfig(
        vocabulary_size=257,
        model_width=64,
        feed_forward_width=128,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_width=16,
        max_positions=1024,
        tokenizer_vocabulary=257,
    ),
    "chargpt-smoke": CharGPTConfig(
        vocabulary_size=49, model_width=48, num_layers=2, num_heads=4, max_positions=32
    ),
    "chargpt-default": CharGPTConfig(
        vocabulary_size=49, model_width=384, num_layers=6, num_heads=6, max_positions=128
    ),
}


def preset(name: str) -> DecoderConfig | CharGPTConfig:
    """The configuration called `name` in PRESETS; ValueError, with the names there are, if none."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
