"""M0. The ledger's bytes: published numbers, ZeRO shares, and what a tiny run really holds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import strategies as st

from gates import shapes
from harness import gate
from reference.config import preset
from reference.ledger.memory import FLOAT32, MIXED, MIXED_FLOAT32_GRADIENTS, BytesPerParameter

NOT_COUNTED = "activations, buffers, the device's context, fragmentation"
PARTS = ("weights", "gradients", "master", "first_moments", "second_moments")
MODEL_CARD_7B = 7_610_000_000


def digits(value, last_place):
    """Within half a unit of the last digit shown."""
    return {"within": (value - last_place / 2, value + last_place / 2), "because": "digits shown"}


@gate(
    claim="16 bytes a parameter are the published GiB of each size",
    roles=["training_memory"],
    not_claimed=NOT_COUNTED,
    source="2 + 2 + 4 + 4 + 4 bytes; 1 GiB = 2^30 B",
)
@pytest.mark.parametrize(
    ("num_parameters", "gib", "last_place"),
    [
        (494_032_768, 7.362, 1e-3),
        (1_543_714_304, 23.003, 1e-3),
        (3_085_938_688, 45.984, 1e-3),
        (7_615_616_512, 113.482, 1e-3),
        (MODEL_CARD_7B, 113.40, 1e-2),
        (124_000_000, 1.8, 0.1),
        (500_000_000, 7.45, 1e-2),
        (1_500_000_000, 22.35, 1e-2),
    ],
)
def test_published(stack, check, num_parameters, gib, last_place):
    memory = stack.training_memory(num_parameters, MIXED, 0, 1)
    check("model state", memory.total_gib, **digits(gib, last_place), unit="GiB")
    check("bytes", memory.total, equal=16 * num_parameters, because="2 + 2 + 4 + 4 + 4 a parameter")


@gate(
    claim="7.61e9 parameters: the published parts, on one rank and over 8 and 16",
    roles=["training_memory"],
    not_claimed=NOT_COUNTED,
    source="a model card's 7.61e9: bf16 weights and gradients, float32 master, m and v",
)
def test_parts_of_seven_billion(stack, check):
    one = stack.training_memory(MODEL_CARD_7B, MIXED, 0, 1)
    published = dict(zip(PARTS, (14.17, 14.17, 28.35, 28.35, 28.35), strict=True))
    for part, gib in published.items():
        check(part, getattr(one, part) / 2**30, **digits(gib, 1e-2), unit="GiB")
    check("optimizer share", one.optimizer / one.total, equal=0.75, because="12 of 16 bytes")
    for num_ranks, gib in ((8, 14.17), (16, 7.09)):
        shared = stack.training_memory(MODEL_CARD_7B, MIXED, 3, num_ranks)
        check(f"evenly over {num_ranks}", shared.total_gib, **digits(gib, 1e-2), unit="GiB")
    small = stack.training_memory(100_000, MIXED, 0, 1)
    check("0.1M", small.total / 2**20, at_most=2.0, because="under 2 MiB", unit="MiB")


@gate(
    claim="the plan's model state in GB and GiB, and its shares under ZeRO 1, 2 and 3 on 8 ranks",
    roles=["training_memory"],
    not_claimed=NOT_COUNTED,
    source="4P + 12P/R, 2P + 14P/R, 16P/R with P = 1,147,766,784 and R = 8; 1 GB = 10^9 B",
)
@pytest.mark.parametrize(("stage", "gb"), [(0, 18.364), (1, 6.313), (2, 4.304), (3, 2.296)])
def test_zero_stages(stack, check, stage, gb):
    memory = stack.training_memory(1_147_766_784, MIXED, stage, 8)
    check("a rank", memory.total_gb, **digits(gb, 1e-3), unit="GB")
    if stage == 0:
        check("a rank", memory.total_gib, **digits(17.103, 1e-3), unit="GiB")


@gate(
    claim="a stage divides its own states and no other, and the shares hold every parameter",
    roles=["training_memory"],
    not_claimed="that a framework cuts evenly: padding a tensor may add elements",
    source="ZeRO (Rajbhandari et al. 2020): optimizer state, then gradients, then weights; the "
    "fullest share of an even cut, by torch.tensor_split of the flat parameters",
)
def test_any_shares(stack, check, for_all):
    @for_all(
        num_parameters=st.integers(1, 5000),
        num_ranks=st.integers(1, 70),
        stage=st.integers(0, 3),
        widths=st.tuples(*[st.integers(0, 8)] * 5),
        max_examples=100,
    )
    def _(num_parameters, num_ranks, stage, widths):
        memory = stack.training_memory(num_parameters, BytesPerParameter(*widths), stage, num_ranks)
        flat = torch.empty(num_parameters, device="meta")
        share = max(part.numel() for part in flat.tensor_split(num_ranks))
        divided_from = {"weights": 3, "gradients": 2}  # the rest is divided from stage 1 on
        for part, width in zip(PARTS, widths, strict=True):
            count = share if stage >= divided_from.get(part, 1) else num_parameters
            check(part, getattr(memory, part), equal=count * width, because="an even cut of P")
        whole = sum(getattr(memory, part) for part in PARTS)
        check("total", memory.total, equal=whole, because="the sum of the parts")
        check("GB", memory.total_gb, equal=whole / 10**9, because="decimal")
        check("GiB", memory.total_gib, equal=whole / 2**30, because="binary")


@gate(
    claim="a tiny run holds exactly the bytes that the ledger predicts",
    roles=["training_memory", "parameter_count", "param_groups", "optimizer_step"],
    not_claimed=NOT_COUNTED,
    source="deepspeedai/DeepSpeed#3442: an estimate charged 20 bytes where 16 are stored; bytes "
    "of the tensors after one update, no peak of an allocator",
)
@pytest.mark.parametrize(
    "layout", [FLOAT32, MIXED, MIXED_FLOAT32_GRADIENTS],
    ids=["float32", "mixed", "mixed-float32-gradients"],
)  # fmt: skip
def test_measured(stack, check, device, layout):
    config = preset("bytes-0.09m")
    model = stack.build_model(config, stack).to(device)
    held = dict.fromkeys(PARTS, 0)
    for parameter in model.parameters():  # the float32 weight: what the optimizer updates
        parameter.grad = torch.ones_like(parameter)
        if layout is not FLOAT32:
            held["weights"] += parameter.bfloat16().nbytes
            held["master"] += parameter.nbytes
        else:
            held["weights"] += parameter.nbytes
        gradient = parameter.grad.bfloat16() if layout is MIXED else parameter.grad
        held["gradients"] += gradient.nbytes
    state = {}
    stack.optimizer_step(stack.param_groups(model, 0.1), state, 1e-3, (0.9, 0.95), 1e-8)
    for adam in state.values():
        held["first_moments"] += adam.first_moment.nbytes
        held["second_moments"] += adam.second_moment.nbytes
    memory = stack.training_memory(stack.parameter_count(config).total, layout, 0, 1)
    for part, number in held.items():
        check(part, getattr(memory, part), equal=number, because="bytes of the run's tensors")
    check("total", memory.total, equal=sum(held.values()), because="bytes of the run's tensors")
    widths = sum(getattr(layout, field.name) for field in fields(layout))
    check("bytes a parameter", layout.total, equal=widths, because="the sum over the parts")


@gate(
    claim="the plan's cache of one sequence is 192 MiB, and 768 MiB with 16 key/value heads",
    roles=["kv_cache_bytes"],
    not_claimed="pages, padding and the cache's own bookkeeping",
    source="2 L T K H elements of 2 bytes: 2 * 24 * 4096 * 4 * 128 * 2 = 201,326,592",
)
def test_kv_cache(stack, check):
    plan = preset("plan-1.15b")
    size = stack.kv_cache_bytes(plan, 1, 4096, 2)
    check("bytes", size, equal=201_326_592, because="an integer of the plan")
    check("MiB", size / 2**20, equal=192.0, because="1 MiB = 2^20 B")
    without_groups = stack.kv_cache_bytes(replace(plan, num_kv_heads=16), 1, 4096, 2)
    check("16 heads, MiB", without_groups / 2**20, equal=768.0, because="four times as many heads")


@gate(
    claim="the cache is as large as the keys and values that a model hands to attention",
    roles=["kv_cache_bytes"],
    not_claimed="pages, padding and the cache's own bookkeeping",
    source="the arguments of the attention role, traced on the meta device in bfloat16",
)
def test_any_kv_cache(stack, check, for_all):
    @for_all(
        config=st.one_of(shapes.decoders(), shapes.chargpts()),
        num_rows=st.sampled_from([2, 1, 3]),
        num_tokens=st.integers(1, 8),
        max_examples=40,
    )
    def _(config, num_rows, num_tokens):
        sizes = []

        def recording(q_BTNH, k_BTKH, v_BTKH, documents_BT):
            sizes.extend([k_BTKH.nbytes, v_BTKH.nbytes])
            return shapes.REFERENCE.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT)

        with torch.device("meta"):
            recorder = shapes.REFERENCE.replace({"attention": recording})
            model = recorder.build_model(config, recorder).bfloat16()
            model(torch.zeros(num_rows, num_tokens, dtype=torch.int64))
        check("bytes", stack.kv_cache_bytes(config, num_rows, num_tokens, 2), equal=sum(sizes),
              because="keys and values of every layer")  # fmt: skip
