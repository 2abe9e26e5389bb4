"""The first update that went wrong is kept from before, and replayed to its first wrong tensor."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.anomaly import NOT_FINITE, OUTLYING, Rule, read
from reference.config import preset
from reference.data.pack import pack
from reference.data.training_text import Windows
from reference.lora import PROJECTIONS
from reference.resume import Checkpoints
from reference.schedule import Schedule
from reference.stack import ROLES
from reference.train import initial_model, train
from reference.train_command import main
from reference.update import UpdateSettings

SETTINGS = UpdateSettings(Schedule(1e-3, 10_000))
CONFIG = replace(preset("bytes-0.09m"), model_width=16, feed_forward_width=16, num_layers=2)
NAN, INF = float("nan"), float("inf")


def windows(num_updates):
    text = torch.randint(257, (8 * 60 + 1,), generator=torch.Generator().manual_seed(0))
    return Windows(pack([text], 8, "drop"), 1, num_updates, 2, 2)


def stack_with(**roles):
    return SimpleNamespace(**{**ROLES, **roles})


def run(folder, num_updates=4, settings=SETTINGS, config=CONFIG, **roles):
    return train(
        config, stack_with(**roles), windows(num_updates), settings,
        checkpoints=Checkpoints(folder, every=100),
    )  # fmt: skip


def anomalies(folder):
    return sorted(path.name for path in folder.glob("anomaly-*"))


def replay(capsys, folder):
    status = main(["replay", str(folder)])
    return status, capsys.readouterr().out.splitlines()


def breaks_at(update, change):
    """A model whose parameters `change` spoils in place before that update, as a bad step would."""
    calls = []

    def accumulate(model, *arguments):
        calls.append(model)
        return ROLES["accumulate"](model, *arguments)

    def optimizer_step(*arguments):
        ROLES["optimizer_step"](*arguments)
        if len(calls) == update - 1:
            with torch.no_grad():
                change(calls[-1])

    return {"accumulate": accumulate, "optimizer_step": optimizer_step}


@pytest.mark.parametrize(
    ("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (NAN, NAN)]
)
def test_what_is_not_finite_is_an_anomaly_from_the_first_update_on(loss, norm):
    rule = Rule()
    assert rule.judge(loss, norm).kind == NOT_FINITE
    assert not rule.norms and not rule.losses_nats


def rule_after(num_updates, loss=2.0, norm=0.5):
    rule = Rule()
    for _ in range(num_updates):
        assert rule.judge(loss, norm) is None
    return rule


@pytest.mark.parametrize(
    ("loss", "norm", "kind"),
    [(2.0, 5.0, None), (2.0, 5.01, OUTLYING), (3.0, 0.5, None), (3.01, 0.5, OUTLYING)],
)
def test_the_rule_stands_where_it_says(loss, norm, kind):
    found = rule_after(20).judge(loss, norm)
    assert (found and found.kind) == kind


def test_nothing_is_outlying_among_the_first_updates():
    assert rule_after(19).judge(9.0, 50.0) is None


def test_only_the_last_fifty_are_remembered():
    rule = rule_after(50)
    for _ in range(25):
        assert rule.judge(2.0, 100.0) is not None  # at least 26 of 50 are 0.5 still
    for _ in range(5):
        rule.judge(2.0, 100.0)
    assert rule.judge(2.0, 100.0) is None


def test_a_parameter_that_is_not_finite_is_named(tmp_path, capsys):
    def change(model):
        model.layers[1].mlp.up_proj.weight[3, 2] = NAN

    run(tmp_path, **breaks_at(3, change))
    assert anomalies(tmp_path) == ["anomaly-00000002"]
    status, lines = replay(capsys, tmp_path / "anomaly-00000002")
    assert status == 1
    assert lines[-1] == (
        "not finite first: parameter layers.1.mlp.up_proj.weight before the update: 1 of 256 "
        "elements, the first at [3, 2] is nan"
    )


def test_an_operator_that_overflows_is_named(tmp_path, capsys):
    def change(model):
        model.layers[1].self_attn.v_proj.weight.fill_(3e38)

    run(tmp_path, **breaks_at(2, change))
    status, lines = replay(capsys, tmp_path / "anomaly-00000001")
    assert status == 1
    assert "microbatch 1, output of linear in layers.1.self_attn.v_proj: " in lines[-1]


def test_a_gradient_that_overflows_is_named(tmp_path, capsys):
    """Huge parameters whose norm is finite forwards and not backwards."""
    settings = UpdateSettings(Schedule(1e25, 10_000))
    run(tmp_path, settings=settings)
    status, lines = replay(capsys, tmp_path / "anomaly-00000001")
    assert status == 1
    assert "microbatch 1, gradient of x of rms_norm in norm" in lines[-1]


def test_what_was_kept_is_the_state_before_and_it_replays_bit_for_bit(tmp_path, capsys):
    def change(model):
        model.lm_head.weight.mul_(1e3)

    kept = run(tmp_path, 30, **breaks_at(26, change))
    assert anomalies(tmp_path) == ["anomaly-00000025"]
    anomaly = read(tmp_path / "anomaly-00000025").anomaly
    assert anomaly.kind == OUTLYING
    assert anomaly.loss_nats == kept.records[25].loss_nats
    assert anomaly.grad_norm == kept.records[25].grad_norm
    status, lines = replay(capsys, tmp_path / "anomaly-00000025")
    assert status == 0
    assert lines[0].startswith("kept because it was outlying: gradient norm ")
    loss, norm = kept.records[25].loss_nats, kept.records[25].grad_norm
    assert lines[1] == (
        f"loss {loss} nats per token (was {loss}), gradient norm {norm} (was {norm})"
    )
    assert lines[2].startswith("the update is finite")
    assert [line.split()[1] for line in lines[3:6]] == [
        "embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"]  # fmt: skip


def test_the_window_is_the_one_of_that_update(tmp_path):
    def change(model):
        model.norm.weight.fill_(NAN)

    run(tmp_path, **breaks_at(3, change))
    kept = read(tmp_path / "anomaly-00000002")
    wanted = list(windows(4))[2]
    for got, want in zip(kept.window.microbatches, wanted.microbatches, strict=True):
        for part in ("input_ids", "labels", "positions", "documents"):
            assert torch.equal(getattr(got, part), getattr(want, part))


def test_only_the_first_of_a_kind_is_kept_and_a_resumed_run_leaves_it(tmp_path):
    def change(model):
        model.norm.weight.fill_(NAN)

    run(tmp_path, 6, **breaks_at(3, change))
    assert anomalies(tmp_path) == ["anomaly-00000002"]
    before = (tmp_path / "anomaly-00000002" / "anomaly.json").read_bytes()
    checkpoints = Checkpoints(tmp_path, every=100, resume=True)
    train(CONFIG, stack_with(), windows(6), SETTINGS, checkpoints=checkpoints)
    assert (tmp_path / "anomaly-00000002" / "anomaly.json").read_bytes() == before


def test_an_even_run_keeps_nothing(tmp_path):
    run(tmp_path, 30)
    assert anomalies(tmp_path) == []


def test_a_model_with_adapters_is_replayed(tmp_path, capsys):
    pytest.importorskip("peft")

    def build(config, stack):
        return ROLES["add_adapters"](
            ROLES["build_model"](config, stack), 2, 3.0, PROJECTIONS, seed=0
        )

    def change(model):
        model.layers[0].mlp.down_proj.lora_B["default"].weight.fill_(INF)

    run(tmp_path, build_model=build, **breaks_at(2, change))
    status, lines = replay(capsys, tmp_path / "anomaly-00000001")
    assert status == 1
    assert "parameter layers.0.mlp.down_proj.lora_B.default.weight before the update" in lines[-1]


def test_another_scale_of_the_adapters_is_refused_at_resume(tmp_path):
    pytest.importorskip("peft")

    def run_with(alpha, resume):
        model = initial_model(CONFIG, stack_with(), 0)
        ROLES["add_adapters"](model, 2, alpha, PROJECTIONS, 0)
        stack = stack_with(build_model=lambda config, stack: model)
        checkpoints = Checkpoints(tmp_path, every=2, resume=resume)
        return train(CONFIG, stack, windows(2), SETTINGS, checkpoints=checkpoints)

    run_with(4.0, False)
    with pytest.raises(ValueError, match="adapters"):
        run_with(8.0, True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "anomaly.json").write_text("{}"), "no kept anomaly"),
        (lambda folder: (folder / "window.safetensors").unlink(), "no kept anomaly"),
        (lambda folder: (folder / "window.safetensors").write_bytes(b"\x80"), "no kept anomaly"),
        (lambda folder: (folder / "step-00000001" / "manifest.json").unlink(), "no checkpoint"),
        (lambda folder: changed(folder, "digests", "data"), "is not the state that"),
        (lambda folder: changed(folder, "config", "family"), "no known family"),
        (lambda folder: changed(folder, "config", "num_layers"), "num_layers"),
        (lambda folder: changed(folder, "settings", "betas"), "betas"),
    ],
    ids=["report", "window", "pickle", "checkpoint", "digest", "family", "shape", "settings"],
)
def test_a_folder_that_was_spoiled_is_refused(tmp_path, capsys, spoil, message):
    run(tmp_path, **breaks_at(2, lambda model: model.norm.weight.fill_(NAN)))
    folder = tmp_path / "anomaly-00000001"
    spoil(folder)
    with pytest.raises(SystemExit) as status:
        main(["replay", str(folder)])
    assert status.value.code == 2
    assert message in capsys.readouterr().err


def changed(folder, part, name):
    file = folder / "anomaly.json"
    report = json.loads(file.read_text())
    report[part][name] = "another"
    file.write_text(json.dumps(report))
