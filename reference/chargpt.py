"""The character GPT: learned positions, LayerNorm, GELU, biases, untied head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.config import CharGPTConfig
from reference.layers import Embedding, Linear, cast, checked_positions
from reference.ops import arithmetic_dtype


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in promote(x.dtype, float32)."""

    def __init__(self, config: CharGPTConfig) -> None:
        super().__init__()
        self.epsilon, self.compute_dtype = config.norm_epsilon, config.compute_dtype
        self.weight = nn.Parameter(torch.empty(config.model_width))
        self.bias = nn.Parameter(torch.empty(config.model_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = arithmetic_dtype(x.dtype)
        weight, bias = (cast(p, self.compute_dtype).to(dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """o_proj(attention(q_proj(x), k_proj(x), v_proj(x))): [B, T, D] -> [B, T, D]."""

    def __init__(self, config: CharGPTConfig, stack: Any) -> None:
        super().__init__()
        self.stack, self.head_width = stack, config.head_width
        width = config.model_width
        self.q_proj = Linear(config, stack, width, width, bias=True)
        self.k_proj = Linear(config, stack, width, width, bias=True)
        self.v_proj = Linear(config, stack, width, width, bias=True)
        self.o_proj = Linear(config, stack, width, width, bias=True)

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
        q_BTNH, k_BTNH, v_BTNH = (
            projection(x_BTD).unflatten(-1, (-1, self.head_width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        o_BTNH = self.stack.attention(q_BTNH, k_BTNH, v_BTNH, documents_BT)
        y_BTD: Tensor = self.o_proj(o_BTNH.flatten(2))
        return y_BTD


class CharGPTLayer(nn.Module):
    """x + self_attn(norm(x)), then x + down_proj(gelu(up_proj(norm(x)))): [B,T,D] -> [B,T,D]."""

    def __init__(self, config: CharGPTConfig, stack: Any) -> None:
        super().__init__()
        width = config.model_width
        self.input_layernorm = LayerNorm(config)
        self.self_attn = Attention(config, stack)
        self.post_attention_layernorm = LayerNorm(config)
        self.up_proj = Linear(config, stack, width, 4 * width, bias=True)
        self.down_proj = Linear(config, stack, 4 * width, width, bias=True)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """positions_BT is not read: they were added to the embedding."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), documents_BT)
        h_BTF = F.gelu(self.up_proj(self.post_attention_layernorm(x_BTD)))
        y_BTD: Tensor = x_BTD + self.down_proj(h_BTF)
        return y_BTD


class CharGPT(nn.Module):
    """Token ids to the final normalised hidden states; logits are hidden @ lm_head.weight^T.

    2VD + TD + L(12 D^2 + 13 D) + 2D parameters with T = max_positions. Source: Radford et al. 2019,
    section 2.3, with an exact GELU and an untied head without a bias.
    """

    def __init__(self, config: CharGPTConfig, stack: Any) -> None:
        super().__init__()
        self.config, self.stack = config, stack
        width = config.model_width
        self.embed_tokens = Embedding(config, config.vocabulary_size, width)
        self.embed_positions = Embedding(config, config.max_positions, width)
        self.layers = nn.ModuleList(CharGPTLayer(config, stack) for _ in range(config.num_layers))
        self.norm = LayerNorm(config)
        self.lm_head = Linear(config, stack, width, config.vocabulary_size, bias=False)

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """hidden [B, T, D] in the compute dtype, after the final norm.

        positions [B, T] int64 default to 0, 1, ... in every row; documents [B, T] integers default
        to one document a row. Raises ValueError on other shapes or a position beyond max_positions.
        """
        limit = self.config.max_positions
        positions_BT = checked_positions(input_ids_BT, positions_BT, documents_BT, limit)
        x_BTD = self.embed_tokens(input_ids_BT) + self.embed_positions(positions_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions_BT, documents_BT)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def reset_parameters(self) -> None:
        """Draws every parameter anew from the global generator, in the order of construction."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding | LayerNorm):
                module.reset_parameters()
