"""The decoder calls the roles that a stack brings: each with the right tensors, in every place."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from reference.config import DecoderConfig
from reference.layers import Linear
from reference.model import build_model
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
DECODER = DecoderConfig(
    vocabulary_size=31,
    model_width=16,
    feed_forward_width=24,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_width=6,
    max_positions=32,
    qkv_bias=True,
)


def test_a_norm_of_one_s_own_is_called_in_every_place():
    calls = []

    def rms_norm(x, weight, eps):
        calls.append(weight)
        return ROLES["rms_norm"](x, weight, eps)

    model = build_model(DECODER, SimpleNamespace(**{**ROLES, "rms_norm": rms_norm}))
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert len(calls) == 2 * DECODER.num_layers + 1


def test_a_fused_norm_is_called_with_the_attention_s_output_and_the_stream():
    calls = []

    def add_rms_norm(x, residual, weight, eps):
        calls.append((x, residual))
        return ROLES["add_rms_norm"](x, residual, weight, eps)

    torch.manual_seed(0)
    plain = build_model(DECODER, STACK)
    fused = build_model(DECODER, SimpleNamespace(**{**ROLES, "add_rms_norm": add_rms_norm}))
    fused.load_state_dict(plain.state_dict())
    ids = torch.arange(7)[None]
    assert torch.equal(fused(ids), plain(ids))
    assert len(calls) == DECODER.num_layers
    assert torch.equal(calls[0][1], plain.embed_tokens(ids))


def with_projections_of_its_own(calls):
    """The reference stack, and what its own projections were called with."""

    def projections(x, weights, biases):
        calls.append((x, weights, biases))
        return ROLES["projections"](x, weights, biases)

    return SimpleNamespace(**{**ROLES, "projections": projections})


def test_projections_of_one_s_own_are_called_for_queries_keys_and_values_and_for_gate_and_up():
    calls = []
    torch.manual_seed(0)
    plain = build_model(DECODER, STACK)
    fused = build_model(DECODER, with_projections_of_its_own(calls))
    fused.load_state_dict(plain.state_dict())
    ids = torch.arange(7)[None]
    assert torch.equal(fused(ids), plain(ids))
    assert [len(weights) for _, weights, _ in calls] == [3, 2] * DECODER.num_layers
    attention = fused.layers[0].self_attn
    (_, weights, biases), (_, gate_and_up, none) = calls[:2]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert all(map(torch.equal, weights, (p.weight for p in projections)))
    assert all(a is b.bias for a, b in zip(biases, projections, strict=True))
    assert gate_and_up[1] is fused.layers[0].mlp.up_proj.weight and none == (None, None)


def test_a_gated_layer_of_one_s_own_is_called_with_the_weights_of_gate_and_up():
    calls = []

    def gated_linear(x, gate_weight, up_weight):
        calls.append((gate_weight, up_weight))
        return ROLES["gated_linear"](x, gate_weight, up_weight)

    torch.manual_seed(0)
    plain = build_model(DECODER, STACK)
    fused = build_model(DECODER, SimpleNamespace(**{**ROLES, "gated_linear": gated_linear}))
    fused.load_state_dict(plain.state_dict())
    ids = torch.arange(7)[None]
    assert torch.equal(fused(ids), plain(ids))
    assert len(calls) == DECODER.num_layers
    mlp = fused.layers[0].mlp
    assert calls[0][0] is mlp.gate_proj.weight and calls[0][1] is mlp.up_proj.weight
    mlp.up_proj.register_forward_hook(lambda *_: None)
    fused(ids)
    assert len(calls) == 2 * DECODER.num_layers - 1


@pytest.mark.parametrize("put_around", ["a hook", "a hook on all", "another class", "a forward"])
def test_layers_that_something_is_put_around_are_called_themselves(put_around):
    calls, seen = [], []
    model = build_model(DECODER, with_projections_of_its_own(calls))
    layer = model.layers[0].self_attn.k_proj

    def watching(module, *_):
        seen.extend([module] * (module is layer))

    def forward(self, x):
        seen.append(self)
        return Linear.forward(self, x)

    if put_around == "another class":
        layer.__class__ = type("Adapted", (Linear,), {"forward": forward})
    elif put_around == "a forward":
        layer.forward = partial(forward, layer)
    else:
        on_all = put_around == "a hook on all"
        register = register_module_forward_hook if on_all else layer.register_forward_hook
        handle = register(watching)
    model(torch.arange(7)[None])
    if "hook" in put_around:
        handle.remove()
    assert seen == [layer]
    assert len(calls) == (0 if put_around == "a hook on all" else 2 * DECODER.num_layers - 1)
