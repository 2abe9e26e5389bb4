"""The decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU), every operator a role of the stack.

Parameters carry the names of Hugging Face's Qwen2 without its `model.` prefix.
"""

from typing import Any

import torch
from torch import Tensor, nn

from reference import ops
from reference.chargpt import CharGPT
from reference.config import CharGPTConfig, DecoderConfig
from reference.layers import Embedding, Linear, cast, checked_positions, gated, project


def build_model(config: DecoderConfig | CharGPTConfig, stack: Any) -> nn.Module:
    """The model of `config` with the roles of `stack`, initialised from torch's global generator.

    Under `with torch.device("meta")` it has shapes and no values; `to_empty` and then
    `reset_parameters` or `load_state_dict` fill it.

    Raises ValueError for a configuration of no known family.
    """
    if isinstance(config, DecoderConfig):
        return Decoder(config, stack)
    if isinstance(config, CharGPTConfig):
        return CharGPT(config, stack)
    raise ValueError(f"config must be a DecoderConfig or a CharGPTConfig, got {config!r}")


class RMSNorm(nn.Module):
    """y = stack.rms_norm(x, weight, eps); weight [D] starts at one."""

    def __init__(self, config: DecoderConfig, stack: Any) -> None:
        super().__init__()
        self.stack, self.epsilon = stack, config.norm_epsilon
        self.compute_dtype = config.compute_dtype
        self.weight = nn.Parameter(torch.empty(config.model_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, self.compute_dtype)
        y: Tensor = self.stack.rms_norm(x, weight, self.epsilon)
        return y


class AddRMSNorm(RMSNorm):
    """(y, total) = stack.add_rms_norm(x, residual, weight, eps): the sum and its norm."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.stack.add_rms_norm is ops.add_rms_norm:
            # The reference's own would call the reference's norm: a stack that brings only
            # rms_norm has it on trial here too.
            total = x + residual
            return super().forward(total), total
        weight = cast(self.weight, self.compute_dtype)
        y, total = self.stack.add_rms_norm(x, residual, weight, self.epsilon)
        return y, total


class SelfAttention(nn.Module):
    """o_proj(attention(rope(q_proj(x), k_proj(x)), v_proj(x))): [B, T, D] -> [B, T, D]."""

    def __init__(self, config: DecoderConfig, stack: Any) -> None:
        super().__init__()
        self.stack, self.theta, self.head_width = stack, config.rope_theta, config.head_width
        query_width = config.num_query_heads * config.head_width
        kv_width = config.num_kv_heads * config.head_width
        bias = config.qkv_bias
        self.q_proj = Linear(config, stack, config.model_width, query_width, bias=bias)
        self.k_proj = Linear(config, stack, config.model_width, kv_width, bias=bias)
        self.v_proj = Linear(config, stack, config.model_width, kv_width, bias=bias)
        self.o_proj = Linear(config, stack, query_width, config.model_width, bias=False)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        q_BTNH, k_BTKH, v_BTKH = (
            torch.unflatten(y, -1, (-1, self.head_width))
            for y in project(self.stack, x_BTD, (self.q_proj, self.k_proj, self.v_proj))
        )
        q_BTNH, k_BTKH = self.stack.rope(q_BTNH, k_BTKH, positions_BT, self.theta)
        o_BTNH = self.stack.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        y_BTD: Tensor = self.o_proj(o_BTNH.flatten(2))
        return y_BTD


class FeedForward(nn.Module):
    """down_proj(swiglu(gate_proj(x), up_proj(x))): [B, T, D] -> [B, T, D] through width F."""

    def __init__(self, config: DecoderConfig, stack: Any) -> None:
        super().__init__()
        self.stack = stack
        self.gate_proj = Linear(
            config, stack, config.model_width, config.feed_forward_width, bias=False
        )
        self.up_proj = Linear(
            config, stack, config.model_width, config.feed_forward_width, bias=False
        )
        self.down_proj = Linear(
            config, stack, config.feed_forward_width, config.model_width, bias=False
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = gated(self.stack, x_BTD, self.gate_proj, self.up_proj)
        y_BTD: Tensor = self.down_proj(h_BTF)
        return y_BTD


class DecoderLayer(nn.Module):
    """x + self_attn(norm(x)), then x + mlp(norm(x)): [B, T, D] -> [B, T, D]."""

    def __init__(self, config: DecoderConfig, stack: Any) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, stack)
        self.mlp = FeedForward(config, stack)
        self.input_layernorm = RMSNorm(config, stack)
        self.post_attention_layernorm = AddRMSNorm(config, stack)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        attended_BTD = self.self_attn(self.input_layernorm(x_BTD), positions_BT, documents_BT)
        normed_BTD, x_BTD = self.post_attention_layernorm(attended_BTD, x_BTD)
        y_BTD: Tensor = x_BTD + self.mlp(normed_BTD)
        return y_BTD


class Decoder(nn.Module):
    """Token ids to the final normalised hidden states; logits are hidden @ lm_head.weight^T.

    With a tied head `lm_head.weight` and `embed_tokens.weight` are one Parameter, also after
    `to_empty`, `to`, `deepcopy` and `load_state_dict(assign=True)`. Source: Qwen2 technical report,
    section 2.2.
    """

    def __init__(self, config: DecoderConfig, stack: Any) -> None:
        super().__init__()
        self.config, self.stack = config, stack
        self.embed_tokens = Embedding(config, config.vocabulary_size, config.model_width)
        self.layers = nn.ModuleList(DecoderLayer(config, stack) for _ in range(config.num_layers))
        self.norm = RMSNorm(config, stack)
        self.lm_head = Linear(config, stack, config.model_width, config.vocabulary_size, bias=False)
        self._tie()
        self.register_load_state_dict_pre_hook(_refuse_a_second_table)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_tie_after_load)  # type: ignore[no-untyped-call]

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
        x_BTD = self.embed_tokens(input_ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions_BT, documents_BT)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def reset_parameters(self) -> None:
        """Draws every parameter anew from the global generator, in the order of construction."""
        for module in self.modules():
            if module is self.lm_head and self.config.tied_head:
                continue  # it would draw the embedding a second time
            if isinstance(module, Linear | Embedding | RMSNorm):
                module.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        # torch gives each module a new Parameter when the device type changes kind (meta to CPU).
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def _tie(self) -> None:
        if self.config.tied_head:
            self.lm_head.weight = self.embed_tokens.weight


def _refuse_a_second_table(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """ValueError if a tied model is offered a head that differs from its embedding."""
    embedding = state.get(f"{prefix}embed_tokens.weight")
    head = state.get(f"{prefix}lm_head.weight")
    tied = isinstance(module, Decoder) and module.config.tied_head
    if not tied or embedding is None or head is None or embedding.is_meta or head.is_meta:
        return
    if not torch.equal(embedding, head.to(embedding.device)):
        raise ValueError(
            "tied_head is True, but lm_head.weight and embed_tokens.weight of the state differ; "
            "load it with tied_head=False or drop one of them"
        )


def _tie_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    if isinstance(module, Decoder):
        module._tie()
