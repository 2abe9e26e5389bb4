"""The decoder calls the roles that a stack brings: each with the right tensors, in every place."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from gates.toys import TINY
from reference.layers import Linear
from reference.model import build_model
from reference.stack import ROLES

IDS = torch.arange(7)[None]


def with_its_own(role, calls):
    """The reference stack with a role of its own, whose arguments are left in `calls`."""

    def own(*arguments):
        calls.append(arguments)
        return ROLES[role](*arguments)

    return SimpleNamespace(**{**ROLES, role: own})


def fused_with(role):
    """A decoder with its own `role`, which gives what the reference's gives, and the calls."""
    calls = []
    torch.manual_seed(0)
    plain = build_model(TINY, SimpleNamespace(**ROLES))
    fused = build_model(TINY, with_its_own(role, calls))
    fused.load_state_dict(plain.state_dict())
    assert torch.equal(fused(IDS), plain(IDS))
    return fused, calls


def test_a_norm_of_one_s_own_is_called_in_every_place():
    _, calls = fused_with("rms_norm")
    assert len(calls) == 2 * TINY.num_layers + 1


def test_a_fused_norm_is_called_with_the_attention_s_output_and_the_stream():
    model, calls = fused_with("add_rms_norm")
    assert len(calls) == TINY.num_layers
    assert torch.equal(calls[0][1], model.embed_tokens(IDS))


def test_projections_of_one_s_own_are_called_for_queries_keys_and_values_and_for_gate_and_up():
    model, calls = fused_with("projections")
    assert [len(weights) for _, weights, _ in calls] == [3, 2] * TINY.num_layers
    attention = model.layers[0].self_attn
    (_, weights, biases), (_, gate_and_up, none) = calls[:2]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert all(map(torch.equal, weights, (p.weight for p in projections)))
    assert all(a is b.bias for a, b in zip(biases, projections, strict=True))
    assert gate_and_up[1] is model.layers[0].mlp.up_proj.weight and none == (None, None)


def test_a_gated_layer_of_one_s_own_is_called_with_the_weights_of_gate_and_up():
    model, calls = fused_with("gated_linear")
    assert len(calls) == TINY.num_layers
    mlp = model.layers[0].mlp
    assert calls[0][1] is mlp.gate_proj.weight and calls[0][2] is mlp.up_proj.weight
    mlp.up_proj.register_forward_hook(lambda *_: None)
    model(IDS)
    assert len(calls) == 2 * TINY.num_layers - 1


@pytest.mark.parametrize("put_around", ["a hook", "a hook on all", "another class", "a forward"])
def test_layers_that_something_is_put_around_are_called_themselves(put_around):
    calls, seen = [], []
    model = build_model(TINY, with_its_own("projections", calls))
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
    model(IDS)
    if "hook" in put_around:
        handle.remove()
    assert seen == [layer]
    assert len(calls) == (0 if put_around == "a hook on all" else 2 * TINY.num_layers - 1)
