"""The shapes at which the kernels are compiled and measured: the four Qwen2.5 models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The widths of a Qwen2.5 model: D, F, query and key/value heads, H, V."""

    width: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_width: int
    vocabulary: int


PRESETS = {
    "0.5B": Preset(896, 4864, 14, 2, 64, 151936),
    "1.5B": Preset(1536, 8960, 12, 2, 128, 151936),
    "3B": Preset(2048, 11008, 16, 2, 128, 151936),
    "7B": Preset(3584, 18944, 28, 4, 128, 152064),
}
