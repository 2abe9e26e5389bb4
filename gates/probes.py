"""What the M1 gates look through: small models of both families, and which token reaches which."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gates import toys
from reference.config import CharGPTConfig, DecoderConfig
from reference.loss import NO_TARGET
from reference.stack import ROLES
from reference.window import Microbatch, Window

# 8 query heads read 2 key/value heads, so that tiled and repeated heads differ; heads times their
# width is not the model's width.
DECODER = DecoderConfig(
    vocabulary_size=61,
    model_width=32,
    feed_forward_width=48,
    num_layers=3,
    num_query_heads=8,
    num_kv_heads=2,
    head_width=6,
    max_positions=64,
    qkv_bias=True,
)
CHARGPT = CharGPTConfig(
    vocabulary_size=61, model_width=32, num_layers=3, num_heads=4, max_positions=64
)
FAMILIES = {"decoder": DECODER, "chargpt": CHARGPT}
REFERENCE = SimpleNamespace(**ROLES)


def built(
    stack: Any, family: str, device: torch.device, rng: torch.Generator, **changes: Any
) -> nn.Module:
    """A small model of the stack on trial whose parameters are all random, biases and gains too."""
    config = replace(FAMILIES[family], **changes)
    model = stack.build_model(config, stack).to(device, toys.working_dtype(stack))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.copy_(center + 0.2 * noise)
    return model


def sharpened(model: nn.Module, factor: float) -> nn.Module:
    """The model with its queries and keys `factor` times larger: scores grow by factor squared."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".q_proj." in name or ".k_proj." in name:
                parameter.mul_(factor)
    return model


def random_ids(rng: torch.Generator, *shape: int) -> Tensor:
    """Token ids [B, T] of the small models."""
    return torch.randint(DECODER.vocabulary_size, shape, generator=rng)


def random_heads(
    stack: Any,
    rng: torch.Generator,
    device: torch.device,
    *,
    rows: int,
    tokens: int,
    heads: int,
    width: int,
) -> Tensor:
    """Standard normal [B, T, heads, H] in the stack's working dtype."""
    x = torch.randn(rows, tokens, heads, width, generator=rng, dtype=torch.float64)
    return x.to(device, toys.working_dtype(stack))


def influence(output_BTX: Tensor, inputs: Tensor, rng: torch.Generator) -> Tensor:
    """How far output token t depends on input token s: norms of gradients [B, t, s] on the CPU.

    The gradient is that of a random combination of everything at output token t, so that it is
    zero only where every single one is. NaN stays NaN.
    """
    cotangent = torch.randn(output_BTX.shape, generator=rng, dtype=torch.float64)
    weighted_BTX = output_BTX * cotangent.to(output_BTX)
    rows_tBs = []
    for t in range(output_BTX.shape[1]):
        (gradient,) = torch.autograd.grad(
            weighted_BTX[:, t].sum(), inputs, retain_graph=True, materialize_grads=True
        )
        rows_tBs.append(gradient.flatten(2).norm(dim=-1).cpu().double())
    return torch.stack(rows_tBs, dim=1)


def layers_cut_apart(
    model: nn.Module, *arguments: Tensor | None
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """One forward pass in which no gradient crosses from a layer to the one before.

    Returns (input, output) [B, T, D] of every layer, the input a leaf, and the hidden states.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def cut(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs.append(args[0].detach().requires_grad_())
        return (inputs[-1], *args[1:]), kwargs

    def keep(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append(output)

    handles = [layer.register_forward_pre_hook(cut, with_kwargs=True) for layer in model.layers]
    handles += [layer.register_forward_hook(keep) for layer in model.layers]
    hidden_BTD = model(*arguments)
    for handle in handles:
        handle.remove()
    return list(zip(inputs, outputs, strict=True)), hidden_BTD


def visible(documents_BT: Tensor) -> Tensor:
    """[B, t, s]: token s is in the document of token t and not after it."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same & torch.ones(same.shape[1:], dtype=torch.bool).tril()


def documents_of(lengths: list[list[int]], names: list[list[int]] | None = None) -> Tensor:
    """documents [B, T] int32 of rows that are cut into documents of these lengths."""
    names = names or [list(range(len(row))) for row in lengths]
    return torch.tensor(
        [
            [name for name, length in zip(ids, row, strict=True) for _ in range(length)]
            for ids, row in zip(names, lengths, strict=True)
        ],
        dtype=torch.int32,
    )


def restarted_positions(documents_BT: Tensor) -> Tensor:
    """positions [B, T] int64 that begin at 0 wherever a new document begins."""
    positions_BT = torch.zeros(documents_BT.shape, dtype=torch.int64)
    for t in range(1, documents_BT.shape[1]):
        goes_on = documents_BT[:, t] == documents_BT[:, t - 1]
        positions_BT[:, t] = torch.where(goes_on, positions_BT[:, t - 1] + 1, 0)
    return positions_BT


def loss_above_chance(
    stack: Any,
    family: str,
    device: torch.device,
    rng: torch.Generator,
    microbatch: Callable[[torch.Generator, int], Microbatch],
) -> list[float]:
    """Trains one layer on fresh `microbatch(rng, V)`; nats a target minus ln V, by update.

    Each loss is of tokens not trained on before, so where they are independent and uniform its
    expectation is never below 0, whatever was learned.
    """
    vocabulary_size = 16
    changes = {"vocabulary_size": vocabulary_size, "num_layers": 1, "initializer_std": 0.02}
    config = replace(FAMILIES[family], **changes)
    model = stack.build_model(config, stack).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(80):
        data = microbatch(rng, vocabulary_size).to(device)
        hidden_BTD = model(data.input_ids, data.positions, data.documents)
        nll_sum, num_targets = stack.token_nll(
            hidden_BTD.flatten(0, 1), model.lm_head.weight, data.labels.flatten()
        )
        optimizer.zero_grad()
        (nll_sum / num_targets).backward()
        optimizer.step()
        losses.append(float(nll_sum.detach() / num_targets) - math.log(vocabulary_size))
    return losses


def labelled_window(rng: torch.Generator, documents_BT: Tensor) -> Window:
    """One microbatch of random rows; every token but a row's last has a random target."""
    input_ids_BT = random_ids(rng, *documents_BT.shape)
    labels_BT = random_ids(rng, *documents_BT.shape)
    labels_BT[:, -1] = NO_TARGET
    positions_BT = restarted_positions(documents_BT)
    return Window((Microbatch(input_ids_BT, labels_BT, positions_BT, documents_BT),))


def without_gradient(family: str) -> tuple[str, ...]:
    """Endings of parameters whose gradient is zero but for rounding.

    A bias of the keys adds the same to all scores of a query unless positions rotate it.
    """
    return ("k_proj.bias",) if family == "chargpt" else ("no such parameter",)
