"""M4. Adapters saved alone come back, here and in peft, and are refused where they do not fit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gates import probes, toys, twins
from gates.m4_lora import ALPHA, RANK, TARGETS, adapted, moved, require_peft, sides
from harness import gate
from harness.compare import relative_error

FILE = "adapter_model.safetensors"


def outcome(function, *arguments):
    """What came back, and "done" or the reason of a refusal. Only a ValueError is a refusal."""
    try:
        return function(*arguments), "done"
    except ValueError as error:
        return None, f"refused: {error}"


@gate(
    claim="adapters are saved without their base, and a base that loads them computes the same, "
    "bit for bit",
    roles=["save_adapters", "load_adapters", "add_adapters"],
    not_claimed="that the files tell which base they belong to",
    source="Hu et al. 2021, section 4.2: a task is switched by its adapters alone",
)
@pytest.mark.parametrize("family", ["decoder", "chargpt"])
def test_round_trip(stack, family, rng, device, tmp_path, check):
    base = probes.built(stack, family, device, rng)
    model = moved(adapted(stack, base, family), rng)
    ids = probes.random_ids(rng, 2, 17).to(device)
    want = model(ids)
    stack.save_adapters(model, tmp_path / "adapters")
    stored = load_file(tmp_path / "adapters" / FILE)
    own = [tensor for pair in sides(model).values() for tensor in pair]
    num_stored, num_own = (sum(t.numel() for t in ts) for ts in (stored.values(), own))
    check("stored elements", num_stored, equal=num_own, because="every A and B, nothing else")
    loaded, reason = outcome(stack.load_adapters, copy.deepcopy(base), tmp_path / "adapters")
    check("loading", reason, equal="done", because="it is the base they were made for")
    changed = (loaded(ids) - want).abs().max()
    check("hidden states changed", changed, equal=0.0, because="nothing is rounded on the way")
    trained = sum(p.requires_grad for p in loaded.parameters())
    check("trained tensors", trained, equal=len(own), because="training goes on with adapters")


@gate(
    claim="peft reads the saved adapters beside transformers' model, which then computes the same",
    roles=["save_adapters"],
    not_claimed="the other way round: what peft can save beyond plain LoRA is refused",
    source="the files of PeftModel.save_pretrained",
)
def test_peft_reads_them(stack, rng, device, tmp_path, check):
    require_peft()
    from peft import PeftModel

    base = probes.built(stack, "decoder", device, rng)
    twin = twins.build(base.config, toys.working_dtype(stack), device)
    twin = twins.load(twin, base.state_dict())
    model = moved(adapted(stack, base, "decoder"), rng)
    stack.save_adapters(model, tmp_path / "adapters")
    twin = PeftModel.from_pretrained(twin, tmp_path / "adapters")
    trained = {name for name, _ in twin.named_parameters() if ".lora_" in name}
    check("matrices with an adapter", len(trained), equal=2 * len(sides(model)), because="A and B")
    ids = probes.random_ids(rng, 2, 17).to(device)
    with torch.no_grad():
        logits = model(ids) @ model.lm_head.weight.T
        theirs = twin(input_ids=ids).logits
    check("relative difference of the logits", relative_error(logits, theirs), at_most=1e-5,
          because="peft may keep adapters in float32; their scale or place would show")  # fmt: skip


def tampered(directory, kind):
    """The saved adapters with one thing wrong."""
    tensors = load_file(directory / FILE)
    settings = json.loads((directory / "adapter_config.json").read_text())
    first = next(iter(sorted(tensors)))
    if kind == "missing":
        del tensors[first]
    elif kind == "unexpected":
        tensors[first.replace("layers.0.", "layers.9.")] = tensors[first].clone()
    elif kind == "rank":
        tensors[first] = tensors[first][:1].contiguous()
    else:
        settings["use_rslora"] = True
    save_file(tensors, directory / FILE)
    (directory / "adapter_config.json").write_text(json.dumps(settings))


@gate(
    claim="adapters that do not fit, or ask for more than plain LoRA, are refused and change "
    "nothing",
    roles=["load_adapters"],
    not_claimed="every option of peft one by one",
    source="a loader that is not strict leaves B at zero: the model is its base and nobody notices",
)
@pytest.mark.parametrize("kind", ["missing", "unexpected", "rank", "option"])
def test_refusals(stack, kind, rng, device, tmp_path, check):
    base = probes.built(stack, "decoder", device, rng)
    require_peft()
    model = probes.REFERENCE.add_adapters(copy.deepcopy(base), RANK, ALPHA, TARGETS["decoder"], 1)
    probes.REFERENCE.save_adapters(moved(model, rng), tmp_path / "adapters")
    tampered(tmp_path / "adapters", kind)
    names = sorted(base.state_dict())
    _, reason = outcome(stack.load_adapters, base, tmp_path / "adapters")
    check("refused", reason.startswith("refused: "), equal=True, because=f"{kind} is wrong")
    check("the base is as it was", sorted(base.state_dict()) == names, equal=True,
          because="what is refused has changed nothing")  # fmt: skip
