"""M4. The ledger's bytes of training adapters are those that a tiny run holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from gates import shapes
from gates.m4_lora import require_peft
from harness import gate
from reference.config import CharGPTConfig
from reference.ledger.memory import FLOAT32, MIXED
from reference.lora import PROJECTIONS

GPT3 = CharGPTConfig(
    vocabulary_size=50257, model_width=12288, num_layers=96, num_heads=96, max_positions=2048
)
NOT_COUNTED = "activations, buffers, the device's context, fragmentation"


@gate(
    claim="adapters of the largest published model have the published number of parameters",
    roles=["adapter_memory"],
    not_claimed=NOT_COUNTED,
    source="Hu et al. 2021, table 4: 4.7M and 37.7M parameters beside 175,255.8M of GPT-3",
)
@pytest.mark.parametrize(("rank", "millions"), [(1, 4.7), (8, 37.7)])
def test_published(stack, rank, millions, check):
    memory = stack.adapter_memory(GPT3, rank, ("q_proj", "v_proj"), MIXED, 0, 1)
    digits = (millions - 0.05, millions + 0.05)
    check("adapter parameters", memory.num_adapter / 1e6, within=digits, unit="M",
          because="96 layers x 2 matrices x rank x 2 x 12288, to the digits shown")  # fmt: skip
    frozen = stack.parameter_count(GPT3).total
    expected = 2 * frozen + 16 * memory.num_adapter
    check("bytes", memory.total, equal=expected, because="2 a frozen parameter, 16 an adapter's")


@gate(
    claim="a model of any shape with adapters holds exactly the bytes that the ledger predicts",
    roles=["adapter_memory", "add_adapters", "param_groups", "optimizer_step"],
    not_claimed=NOT_COUNTED,
    source="bytes of the tensors after one update",
)
def test_measured(stack, device, check, for_all):
    require_peft()

    @for_all(
        config=shapes.decoders(),
        rank=st.integers(1, 5),
        targets=st.sets(st.sampled_from(PROJECTIONS), min_size=1).map(sorted),
        max_examples=25,
    )
    def _(config, rank, targets):
        model = stack.build_model(config, stack).to(device)
        stack.add_adapters(model, rank, 2.0 * rank, targets, 0)
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        state = {}
        stack.optimizer_step(stack.param_groups(model, 0.1), state, 1e-3, (0.9, 0.95), 1e-8)
        memory = stack.adapter_memory(config, rank, targets, FLOAT32, 0, 1)
        moments = [m for s in state.values() for m in (s.first_moment, s.second_moment)]
        held = {
            "frozen weights": (memory.frozen.total, sum(p.nbytes for p in frozen)),
            "adapters": (memory.adapters.weights, sum(p.nbytes for p in trained)),
            "gradients": (memory.adapters.gradients, sum(p.grad.nbytes for p in trained)),
            "moments": (memory.adapters.optimizer, sum(m.nbytes for m in moments)),
        }
        for name, (predicted, measured) in held.items():
            check(name, predicted, equal=measured, because="bytes of the tensors")


@gate(
    claim="ZeRO divides adapters and the frozen model, each by its own stage",
    roles=["adapter_memory"],
    not_claimed=NOT_COUNTED,
    source="Rajbhandari et al. 2020: a frozen model has weights only, and stage 3 divides those",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages(stack, stage, check, for_all):
    @for_all(config=shapes.decoders(), num_ranks=st.integers(2, 9), max_examples=20)
    def _(config, num_ranks):
        memory = stack.adapter_memory(config, 2, PROJECTIONS, MIXED, stage, num_ranks)
        frozen = shapes.REFERENCE.parameter_count(config).total
        share = -(-frozen // num_ranks) if stage == 3 else frozen
        check("frozen bytes", memory.frozen.total, equal=2 * share, because="weights only")
        adapters = shapes.REFERENCE.training_memory(memory.num_adapter, MIXED, stage, num_ranks)
        check("adapter bytes", memory.adapters.total, equal=adapters.total, because="16 B, divided")
        check("total", memory.total, equal=2 * share + adapters.total, because="the sum")
