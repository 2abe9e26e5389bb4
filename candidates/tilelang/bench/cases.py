"""What is measured: each operator at the shapes of the presets, with its peers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from candidates import tilelang as ours
from candidates.peers import liger
from candidates.tilelang.gated_linear import gated_linear
from candidates.tilelang.presets import Preset
from candidates.tilelang.projections import projections
from reference import ops

NUM_TOKENS = 16384
EPSILON, THETA = 1e-6, 1e6


@dataclass(frozen=True)
class Case:
    """One operator at one shape. `implementations`: name -> a function of `inputs` to outputs.

    bytes_moved and flops: of the forward and of the backward, the least that must be done.
    """

    operator: str
    shape: str
    inputs: tuple[Tensor, ...]
    implementations: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]]
    bytes_moved: tuple[int, int] = (0, 0)
    flops: tuple[int, int] = (0, 0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale
    return x.requires_grad_()


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * weight).to(x.dtype)


def norm_cases(p: Preset) -> Iterator[Case]:
    x, weight = random(NUM_TOKENS, p.width), random(p.width)
    yield Case(
        "rms_norm", f"{NUM_TOKENS} x {p.width}", (x, weight),
        {
            "TileLang": lambda x, w: ours.ROLES["rms_norm"](x, w, EPSILON),
            "eager": eager_norm,
            "compiled": torch.compile(eager_norm),
            "Liger": lambda x, w: liger.rms_norm(x, w, EPSILON),
        },
        bytes_moved=(2 * x.nbytes, 3 * x.nbytes),
    )  # fmt: skip


def fused_norm_cases(p: Preset) -> Iterator[Case]:
    x, residual, weight = random(NUM_TOKENS, p.width), random(NUM_TOKENS, p.width), random(p.width)

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_norm(total, weight), total

    yield Case(
        "add_rms_norm", f"{NUM_TOKENS} x {p.width}", (x, residual, weight),
        {
            "TileLang": lambda x, r, w: ours.ROLES["add_rms_norm"](x, r, w, EPSILON),
            "eager": eager,
            "compiled": torch.compile(eager),
        },
        bytes_moved=(4 * x.nbytes, 4 * x.nbytes),
    )  # fmt: skip


def swiglu_cases(p: Preset) -> Iterator[Case]:
    gate, up = random(NUM_TOKENS, p.feed_forward), random(NUM_TOKENS, p.feed_forward)

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    yield Case(
        "swiglu", f"{NUM_TOKENS} x {p.feed_forward}", (gate, up),
        {
            "TileLang": ours.ROLES["swiglu"],
            "eager": eager,
            "compiled": torch.compile(eager),
            "Liger": liger.swiglu,
        },
        bytes_moved=(3 * gate.nbytes, 5 * gate.nbytes),
    )  # fmt: skip


def rope_cases(p: Preset) -> Iterator[Case]:
    num_rows, num_tokens = 4, NUM_TOKENS // 4
    q = random(num_rows, num_tokens, p.query_heads, p.head_width)
    k = random(num_rows, num_tokens, p.kv_heads, p.head_width)
    positions = torch.arange(num_tokens, device="cuda").expand(num_rows, -1).contiguous()
    exponent = torch.arange(0, p.head_width, 2, device="cuda") / p.head_width
    angles = positions[..., None].float() * THETA**-exponent
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(pair, dim=-1).to(x.dtype)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q), rotate(k)

    moved = 2 * (q.nbytes + k.nbytes)
    yield Case(
        "rope", f"4 x {num_tokens}, {p.query_heads}/{p.kv_heads} heads, H {p.head_width}", (q, k),
        {
            "TileLang": lambda q, k: ours.ROLES["rope"](q, k, positions, THETA),
            "eager": eager,
            "compiled": torch.compile(eager),
            # Liger turns its inputs in place, which autograd forbids for leaves: it gets copies.
            "Liger + copy": lambda q, k: liger.rope(q.clone(), k.clone(), positions, THETA),
        },
        bytes_moved=(moved, moved),
    )  # fmt: skip


def attention_cases(p: Preset) -> Iterator[Case]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    num_rows, num_tokens = 4, 4096
    q = random(num_rows, num_tokens, p.query_heads, p.head_width)
    k = random(num_rows, num_tokens, p.kv_heads, p.head_width)
    v = random(num_rows, num_tokens, p.kv_heads, p.head_width)

    def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            return o.transpose(1, 2)

        return call

    products = 2 * num_rows * p.query_heads * num_tokens**2 * p.head_width  # two, half of each
    for num_documents in (1, 8):
        documents = None
        peers = {
            "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
            "flash": sdpa(SDPBackend.FLASH_ATTENTION),
        }
        if num_documents > 1:
            index = torch.arange(num_tokens, device="cuda") * num_documents // num_tokens
            documents, peers = index.int().expand(num_rows, -1).contiguous(), {}
        yield Case(
            "attention",
            f"4 x {num_tokens}, {p.query_heads}/{p.kv_heads} heads, H {p.head_width}, "
            f"{num_documents} document{'s' if num_documents > 1 else ''}",
            (q, k, v),
            {
                "TileLang": lambda q, k, v, d=documents: ours.ROLES["attention"](q, k, v, d),
                **peers,
            },
            flops=(products // num_documents, products * 5 // 2 // num_documents),
        )


def linear_cases(p: Preset) -> Iterator[Case]:
    for inner, outer in ((p.width, p.feed_forward), (p.feed_forward, p.width)):
        x, weight = random(NUM_TOKENS, inner), random(outer, inner, scale=inner**-0.5)
        product = 2 * NUM_TOKENS * inner * outer
        yield Case(
            "linear", f"{NUM_TOKENS} x {inner} -> {outer}", (x, weight),
            {"TileLang": lambda x, w: ours.ROLES["linear"](x, w, None), "cuBLAS": F.linear},
            flops=(product, 2 * product),
        )  # fmt: skip


def projections_cases(p: Preset) -> Iterator[Case]:
    query_width, kv_width = p.query_heads * p.head_width, p.kv_heads * p.head_width
    yield projections_case(p.width, (query_width, kv_width, kv_width), biased=True)
    yield projections_case(p.width, (p.feed_forward, p.feed_forward), biased=False)


def projections_case(inner: int, widths: tuple[int, ...], biased: bool) -> Case:
    num, none = len(widths), (None,) * len(widths)
    x, weights = random(NUM_TOKENS, inner), [random(n, inner, scale=inner**-0.5) for n in widths]
    product = 2 * NUM_TOKENS * inner * sum(widths)
    return Case(
        "projections", f"{NUM_TOKENS} x {inner} -> {', '.join(map(str, widths))}",
        (x, *weights, *(random(n) for n in widths if biased)),
        {
            "TileLang": lambda x, *given: projections(x, given[:num], given[num:] or none),
            "one by one": lambda x, *given: ops.projections(x, given[:num], given[num:] or none),
        },
        flops=(product, 2 * product),
    )  # fmt: skip


def gated_cases(p: Preset) -> Iterator[Case]:
    weights = [random(p.feed_forward, p.width, scale=p.width**-0.5) for _ in range(2)]
    product = 4 * NUM_TOKENS * p.width * p.feed_forward
    yield Case(
        "gated_linear", f"{NUM_TOKENS} x {p.width} -> {p.feed_forward}",
        (random(NUM_TOKENS, p.width), *weights),
        {
            "TileLang": gated_linear,
            "one by one": lambda x, g, u: ours.ROLES["swiglu"](F.linear(x, g), F.linear(x, u)),
        },
        flops=(product, 2 * product),
    )  # fmt: skip


def loss_cases(p: Preset) -> Iterator[Case]:
    hidden = random(NUM_TOKENS, p.width)
    weight = random(p.vocabulary, p.width, scale=p.width**-0.5)
    labels = torch.randint(p.vocabulary, (NUM_TOKENS,), device="cuda")

    @torch.no_grad()
    def products(hidden: Tensor, weight: Tensor) -> Tensor:
        """What a loss cannot avoid: hidden W^T, and products as large for both gradients."""
        for rows in hidden.split(1024):
            logits = rows @ weight.T
            dhidden, dweight = logits @ weight, logits.T @ rows
        return dhidden.sum() + dweight[0].sum()

    yield Case(
        "token_nll", f"{NUM_TOKENS} x {p.width}, V {p.vocabulary}", (hidden, weight),
        {
            "TileLang": lambda h, w: ours.ROLES["token_nll"](h, w, labels)[0],
            "Liger": lambda h, w: liger.token_nll(h, w, labels)[0],
            "three products": products,
        },
        # The gradients are there after the forward; the backward multiplies them by the cotangent.
        bytes_moved=(0, 2 * (hidden.nbytes + weight.nbytes)),
        flops=(6 * NUM_TOKENS * p.width * p.vocabulary, 0),
    )  # fmt: skip


CASES = {
    "rms_norm": norm_cases,
    "add_rms_norm": fused_norm_cases,
    "rope": rope_cases,
    "swiglu": swiglu_cases,
    "attention": attention_cases,
    "linear": linear_cases,
    "projections": projections_cases,
    "gated_linear": gated_cases,
    "token_nll": loss_cases,
}
