"""Adapters: what cannot work is refused before the model is touched."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import preset
from reference.ledger.__main__ import main as ledger
from reference.ledger.adapters import adapter_memory
from reference.ledger.memory import FLOAT32
from reference.stack import ROLES

pytest.importorskip("peft")

from reference.lora import (
    PROJECTIONS,
    add_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)

STACK = SimpleNamespace(**ROLES)
CONFIG = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return STACK.build_model(CONFIG, STACK)


@pytest.mark.parametrize(
    ("rank", "alpha", "targets", "message"),
    [
        (0, 1.0, PROJECTIONS, "the rank must be a whole number of at least 1, got 0"),
        (True, 1.0, PROJECTIONS, "got True"),
        (2, 0.0, PROJECTIONS, "alpha must be a finite number above 0, got 0"),
        (2, float("nan"), PROJECTIONS, "got nan"),
        (2, 1.0, (), r"got \[\]"),
        (2, 1.0, ("lm_head",), r"got \['lm_head'\]"),
        (2, 1.0, ("embed_tokens",), r"got \['embed_tokens'\]"),
    ],
)
def test_what_cannot_be_an_adapter_is_refused(model, rank, alpha, targets, message):
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        add_adapters(model, rank, alpha, targets, 0)
    assert list(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_on_adapters_are_refused(model):
    add_adapters(model, 2, 4.0, PROJECTIONS, 0)
    with pytest.raises(ValueError, match="has adapters already"):
        add_adapters(model, 2, 4.0, PROJECTIONS, 0)


def test_a_model_without_adapters_has_none_to_merge_or_save(model, tmp_path):
    with pytest.raises(ValueError, match="has no adapters"):
        merge_adapters(model)
    with pytest.raises(ValueError, match="has no adapters"):
        save_adapters(model, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


def test_a_merged_model_can_be_adapted_again(model):
    merge_adapters(add_adapters(model, 2, 4.0, ("q_proj",), 0))
    names = [n for n, _ in add_adapters(model, 3, 4.0, ("v_proj",), 0).named_parameters()]
    assert sum(".lora_" in name for name in names) == 2 * CONFIG.num_layers


def test_the_seed_is_the_only_randomness(model):
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    add_adapters(model, 2, 4.0, PROJECTIONS, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    add_adapters(twin, 2, 4.0, PROJECTIONS, 5)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_weights_that_are_not_finite_are_not_merged(model):
    add_adapters(model, 2, 4.0, PROJECTIONS, 0)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.lora_B["default"].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        merge_adapters(model)


def test_a_folder_with_content_is_not_overwritten(model, tmp_path):
    (tmp_path / "mine").write_text("do not lose me")
    add_adapters(model, 2, 4.0, PROJECTIONS, 0)
    with pytest.raises(ValueError, match="exists already"):
        save_adapters(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora True is not read"),
        ({"bias": "all"}, "bias 'all' is not read"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_dropout": 0.1}, "lora_dropout 0.1 is not read"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"an_option_of_tomorrow": 3}, "an_option_of_tomorrow 3 is not read"),
        ({"target_modules": "all-linear"}, "a list of target_modules, got 'LORA' and 'all-linear'"),
        ({"peft_type": "IA3"}, "got 'IA3'"),
        ({"r": "8"}, "the rank must be a whole number"),
    ],
)
def test_more_than_plain_lora_is_refused_by_name(model, tmp_path, change, message):
    save_adapters(
        add_adapters(copy.deepcopy(model), 2, 4.0, PROJECTIONS, 0), tmp_path / "a"
    )  # fmt: skip
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_adapters(model, tmp_path / "a")
    assert not hasattr(model, "peft_config")


def test_a_damaged_file_of_adapters_is_named(model, tmp_path):
    save_adapters(add_adapters(copy.deepcopy(model), 2, 4.0, PROJECTIONS, 0), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"cannot read .*adapter_model\.safetensors"):
        load_adapters(model, tmp_path / "a")


def test_the_ledger_refuses_what_the_model_does():
    with pytest.raises(ValueError, match=r"targets must be among .*got \['lm_head'\]"):
        adapter_memory(CONFIG, 2, ["lm_head"], FLOAT32, 0, 1)
    with pytest.raises(ValueError, match="rank of an adapter must be at least 1, got 0"):
        adapter_memory(CONFIG, 0, PROJECTIONS, FLOAT32, 0, 1)


def test_the_books_show_adapters_when_they_are_asked_for(capsys):
    # 24 layers x 8 x the sides of q, k, v, o (896 and 896 or 128), gate, up, down (896 and 4864).
    sides = 2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)
    assert ledger(["--preset", "qwen2.5-0.5b", "--lora-rank", "8"]) == 0
    assert f"{24 * 8 * sides:,} adapter parameters" in " ".join(capsys.readouterr().out.split())
    assert ledger(["--preset", "qwen2.5-0.5b"]) == 0
    assert "LoRA" not in capsys.readouterr().out
