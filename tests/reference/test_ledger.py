"""The ledger's numbers, its refusals, and the books it prints."""

import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from reference.config import preset
from reference.ledger.__main__ import main, whole_number
from reference.ledger.book import MODEL_CARD_PARAMETERS
from reference.ledger.flops import FlopsConvention, flops_of_parameters, training_flops
from reference.ledger.memory import (
    FLOAT32,
    MIXED,
    MIXED_FLOAT32_GRADIENTS,
    kv_cache_bytes,
    training_memory,
)
from reference.ledger.parameters import parameter_count, rotary_frequencies
from reference.ledger.time import (
    TokenCounts,
    hardware_flops_utilization,
    model_flops_utilization,
    throughput,
    token_counts,
    training_time,
)
from reference.ledger.windows import count_targets, plan_windows, window_rows
from reference.window import Microbatch

PLAN = preset("plan-1.15b")
CAUSAL = FlopsConvention("parameters", 6)


def test_a_layer_of_the_plan_has_the_published_parts():
    one, two = (parameter_count(replace(PLAN, num_layers=layers)) for layers in (1, 2))
    assert two.attention - one.attention == 10_485_760
    assert two.feed_forward - one.feed_forward == 34_603_008
    assert two.norms - one.norms == 4_096
    assert one.norms - 4_096 == 2_048


def test_untying_the_head_adds_one_table():
    tied, untied = parameter_count(PLAN), parameter_count(replace(PLAN, tied_head=False))
    assert untied.total - tied.total == 65_536_000
    assert untied.multiplying == tied.multiplying
    assert untied.without_vocabulary == tied.without_vocabulary


def test_the_plan_reads_twenty_tokens_a_parameter():
    total = parameter_count(PLAN).total
    assert round(23e9 / total, 3) == 20.039
    assert 20 * total == 22_955_335_680


def test_the_model_card_of_7b_costs_the_published_flops():
    assert flops_of_parameters(MODEL_CARD_PARAMETERS["qwen2.5-7b"], 10**10) == 4566 * 10**17


def test_the_model_cards_agree_in_the_digits_they_give():
    for name, rounded in MODEL_CARD_PARAMETERS.items():
        assert abs(parameter_count(preset(name)).total - rounded) < 10**7


def test_layouts_take_16_16_and_18_bytes():
    layouts = (FLOAT32, MIXED, MIXED_FLOAT32_GRADIENTS)
    assert [layout.total for layout in layouts] == [16, 16, 18]


def test_seven_billion_parameters_and_their_states_fit_one_card_of_141_gb():
    assert training_memory(7_615_616_512, MIXED, 0, 1).total_gb < 141


def test_frequencies_fall_from_one_by_a_constant_factor():
    frequencies = rotary_frequencies(preset("qwen2.5-7b"))
    assert len(frequencies) == 64
    assert frequencies[0] == 1.0
    factors = [after / before for before, after in itertools.pairwise(frequencies)]
    assert factors == pytest.approx([1e6 ** (-1 / 64)] * 63)


def test_conventions_differ_in_their_words():
    conventions = [
        FlopsConvention(weights, kappa, layers, scores and kappa > 0)
        for weights in ("parameters", "products")
        for kappa in (0, 6, 12)
        for layers in (False, True)
        for scores in (False, True)
    ]
    assert len({convention.text for convention in conventions}) == len(set(conventions))


def test_a_flash_kernel_computes_seven_sixths_of_its_attention():
    flops = training_flops(PLAN, 1, 4096, FlopsConvention("parameters", 6, recompute_scores=True))
    assert 6 * (flops.attention_per_token + flops.recomputed_per_token) == (
        7 * flops.attention_per_token
    )


def test_mfu_counts_the_model_and_hfu_the_hardware():
    again = FlopsConvention("parameters", 6, recompute_layers=True)
    flops = training_flops(preset("qwen2.5-7b"), 12_402, 4096, again)
    mfu = model_flops_utilization(flops, 1.0, 1, 989e12)
    hfu = hardware_flops_utilization(flops, 1.0, 1, 989e12)
    assert mfu.fraction == pytest.approx(0.604, abs=5e-4)
    assert hfu.fraction / mfu.fraction == pytest.approx(flops.hardware_total / flops.model_total)
    assert "model" in mfu.counted
    assert "hardware" in hfu.counted
    assert mfu.convention == again.text


def test_a_utilization_above_one_is_refused_with_the_share():
    flops = training_flops(PLAN, 1000, 4096, CAUSAL)
    with pytest.raises(ValueError, match=r"1\.250 of the peak .*convention"):
        model_flops_utilization(flops, 1.0, 1, flops.model_total / 1.25)


def test_padding_is_no_token_and_a_prompt_is_no_target():
    labels_BT = torch.tensor([[-100, 5, 6, -100, -100], [1, -100, -100, -100, -100]])
    documents_BT = torch.tensor([[0, 0, 0, 0, -1], [1, 1, -1, -1, -1]], dtype=torch.int32)
    microbatch = Microbatch(labels_BT.abs(), labels_BT, labels_BT.abs(), documents_BT)
    assert token_counts(microbatch) == TokenCounts(positions=10, real=6, supervised=3)
    assert token_counts(replace(microbatch, documents=None)).real == 10


def test_a_target_on_padding_is_refused():
    documents_BT = torch.tensor([[-1, 0]], dtype=torch.int32)
    labels_BT = torch.tensor([[3, -100]])
    with pytest.raises(ValueError, match="padding carries a target"):
        token_counts(Microbatch(labels_BT.abs(), labels_BT, labels_BT.abs(), documents_BT))


def test_a_last_window_that_fits_exactly_overshoots_nothing():
    for policy in ("trim", "overshoot"):
        plan = plan_windows(96, 8, 2, 3, 2, policy)
        assert (plan.num_updates, plan.last_window_tokens, plan.overshoot_tokens) == (1, 96, 0)


def test_a_trimmed_run_reads_no_row_past_its_end():
    plan = plan_windows(17, 8, 2, 1, 2, "trim")
    rows = [list(window_rows(plan, 0, rank, 0)) for rank in range(2)]
    assert rows == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parameter_count(7), "DecoderConfig or a CharGPTConfig, got int"),
        (lambda: training_memory(0, MIXED, 0, 1), "0 parameters on 1 ranks"),
        (lambda: training_memory(5, MIXED, 0, 0), "5 parameters on 0 ranks"),
        (lambda: training_memory(5, MIXED, 4, 1), "stages 0 .*, got 4"),
        (lambda: kv_cache_bytes(PLAN, 0, 1, 2), "at least 1 for rows, got 0"),
        (lambda: kv_cache_bytes(PLAN, 1, 4097, 2), "max_positions 4096"),
        (lambda: FlopsConvention("weights", 6), '"parameters" or "products", got \'weights\''),
        (lambda: FlopsConvention("products", 7), "got 7; what a kernel computes again"),
        (lambda: FlopsConvention("products", 0, recompute_scores=True), "kappa 6 or 12"),
        (lambda: training_flops(PLAN, 0, 1, CAUSAL), "got 0 tokens"),
        (lambda: training_flops(PLAN, 1, 4097, CAUSAL), "rows of 4097"),
        (lambda: training_time(1.0, 0, 1.0, 1.0), "got 0"),
        (lambda: training_time(math.nan, 1, 1.0, 1.0), "got nan"),
        (lambda: training_time(1.0, 1, math.inf, 1.0), "got inf"),
        (lambda: training_time(1.0, 1, 1.0, 1.01), r"\(0, 1\], got 1.01"),
        (lambda: training_time(1.0, 1, 1.0, math.nan), r"\(0, 1\], got nan"),
        (lambda: throughput([], 1.0), "got none"),
        (lambda: throughput([TokenCounts(1, 1, 1)], 0.0), "got 0.0"),
        (lambda: plan_windows(1.5, 1, 1, 1, 1, "trim"), "total_tokens must be an integer .*1.5"),
        (lambda: plan_windows(1, 1, 0, 1, 1, "trim"), "num_rows must be .* got 0"),
        (lambda: plan_windows(1, 1, 1, 1, 1, "drop"), "got 'drop'"),
        (lambda: window_rows(plan_windows(1, 1, 1, 1, 1, "trim"), 1, 0, 0), "1 of update.*got 1"),
        (lambda: count_targets([3, 0], "inside"), r"\[3, 0\]"),
        (lambda: count_targets([3], "both"), "got 'both'"),
    ],
)
def test_bad_input_is_refused_with_what_came(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def printed(capsys, *arguments):
    """The words the command prints, with table rules and repeated blanks taken out."""
    assert main(arguments) == 0
    return re.sub(r"[\s│┃]+", " ", capsys.readouterr().out)


def test_the_books_of_7b_hold_the_published_numbers(capsys):
    words = printed(
        capsys, "--preset", "qwen2.5-7b", "--tokens", "10e9", "--ranks", "8", "--tflops", "120"
    )
    for number in (
        "7,615,616,512 100.00%",
        "without vocabulary tables 6,525,621,760",
        "total 113.482 39.009 26.597 14.185",
        "model card's 7.61e9 113.40 38.98 26.58 14.17",
        "4.5693699072e20",
        "4.566e20",
        "1,056.94 1,056.94 132.12 16.51 ASSUMED",
        "234,881,024 224",
        "updates (a number, not tokens) 9,537",
        "120 TFLOP/s ASSUMED",
    ):
        assert number in words


def test_the_books_of_the_plan_hold_the_published_numbers(capsys):
    words = printed(
        capsys, "--preset", "plan-1.15b", "--tokens", "23e9", "--tflops", "312",
        "--utilization", "0.2", "0.3", "0.4", "0.5", "--last-window", "overshoot",
    )  # fmt: skip
    for number in (
        "total P 1,147,766,784",
        "20.039",
        "22,955,335,680",
        "total 17.103 5.879 4.009 2.138",
        "total, GB 18.364 6.313 4.304 2.296",
        "6 P + 6 L T N H (causal half) 8,094,560,256 1.86174885888e20",
        "6 P + 12 L T N H (full scores) 9,302,519,808 2.13957955584e20",
        "1.58391816192e20",
        "4 key/value heads, as configured 201,326,592 192",
        "805,306,368 768",
        "a window 1,048,576",
        "21,935",
        "left for the last window 534,016",
        "23,000,514,560",
        "too many 514,560",
        "last window as declared (overshoot) 1,048,576",
    ):
        assert number in words
    for hours in ("88.14", "58.76", "44.07", "35.25", "119.06", "79.37", "59.53", "47.62"):
        assert f" {hours} " in words


def test_every_convention_is_printed_beside_its_number(capsys):
    words = printed(capsys, "--preset", "bytes-0.09m")
    for convention in (
        "1 multiply-add = 2 FLOPs",
        "attention not counted",
        "1 GiB = 2^30 B, 1 GB = 10^9 B",
        "Not counted: activations, buffers, context, fragmentation",
        "HFU divides hardware FLOPs",
        "inputs, never results",
    ):
        assert convention in words


def test_the_books_of_a_character_gpt_have_positions_and_no_groups(capsys):
    words = printed(capsys, "--preset", "chargpt-smoke")
    assert "learned positions 1,536" in words
    assert "total P 62,880" in words
    assert "rope theta" not in words
    assert "MiB" in words
    assert "model card" not in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--preset"),
        (["--preset", "gpt-5"], "invalid choice"),
        (["--preset", "plan-1.15b", "--tokens", "many"], "'many' is no number"),
        (["--preset", "plan-1.15b", "--tokens", "1.5"], "no whole number"),
        (["--preset", "plan-1.15b", "--tokens", "1e400000000"], "no whole number"),
        (["--preset", "plan-1.15b", "--ranks", "0"], "no whole number"),
        (["--preset", "plan-1.15b", "--context", "4097"], "rows of 4097"),
        (["--preset", "plan-1.15b", "--tflops", "nan"], "got nan"),
        (["--preset", "plan-1.15b", "--tflops", "-1"], "got -1"),
        (["--preset", "plan-1.15b", "--utilization", "1.2"], "got 1.2"),
    ],
)
def test_bad_options_end_with_status_2_and_print_no_book(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert words in output.err
    assert output.out == ""


def test_no_number_is_cut_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("reference.ledger.__main__.WIDTH_WITHOUT_TERMINAL", 60)
    assert "…" not in printed(capsys, "--preset", "qwen2.5-7b")


def test_whole_numbers_are_read_exactly():
    assert whole_number("23e9") == 23_000_000_000
    assert whole_number("23_000_000_000") == 23_000_000_000
    assert whole_number("9007199254740993") == 2**53 + 1


def test_the_command_runs_as_a_module_into_a_pipe():
    finished = subprocess.run(
        [sys.executable, "-m", "reference.ledger", "--preset", "plan-1.15b", "--tokens", "23e9"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "1,147,766,784" in finished.stdout
    assert max(map(len, finished.stdout.splitlines())) <= 118
