"""Evidence that nobody measured, to render and to tamper with."""

import math

from harness.evidence import EvidenceWriter
from harness.verdict import exit_status, gate_verdict, margin, measurement_passes, run_verdict

LINEAR = "float64, and only the order of the summation differs"


def measurement(name, value, because="it follows from the definition", unit="", count=1, **bound):
    return {
        "name": name,
        "value": value,
        "bound": bound,
        "because": because,
        "unit": unit,
        "passed": measurement_passes(value, bound),
        "margin": margin(value, bound),
        "count": count,
    }


def record(gate, *measurements, case="", claim="It holds.", roles=("accumulate",), **others):
    """One gate on the stack on trial; FAIL if a measurement failed, ERROR without any."""
    failed = [m for m in measurements if not m["passed"]]
    reason = f"{failed[0]['name']}: measured {failed[0]['value']}" if failed else ""
    file, function = gate.split("::")
    made = {
        "kind": "gate",
        "gate": gate,
        "case": case,
        "milestone": file[:2].upper(),
        "nodeid": f"gates/{file}.py::{function}[{case}-reference]",
        "claim": claim,
        "not_claimed": "speed, low precision, several ranks",
        "source": "the objective summed over the window's supervised tokens, section 5.3",
        "roles": list(roles),
        "measurements": list(measurements),
        "series": [],
        "called": list(roles),
        "verdict": gate_verdict(measurements),
        "reason": reason if measurements else "the gate measured nothing",
        "duration_s": 0.05 + 0.01 * len(gate),
    }
    return {**made, **others}


def variant(kind, name, role, summary, origin, gate, *measurements, case="", **others):
    """One gate on a fault or a benign variant."""
    made = record(gate, *measurements, case=case, roles=(role,), **others)
    field = "seen_in" if kind == "fault" else "because"
    return {
        **made,
        "kind": kind,
        "nodeid": made["nodeid"].replace("reference]", f"{kind}:{name}]"),
        "variant": {"name": name, "role": role, "summary": summary, field: origin},
    }


def not_run(made, reason):
    return {**made, "measurements": [], "verdict": "NOT_RUN", "reason": reason}


def run_line(**others):
    return {
        "kind": "run",
        "started": "2026-03-14T10:22:07+00:00",
        "command": ["pytest", "-m", "M0 or M1 or M2"],
        "selection": {
            "expression": "M0 or M1 or M2",
            "keyword": "",
            "last_failed": False,
            "no_faults": False,
            "allow_incomplete": False,
        },
        "device": {
            "kind": "cpu",
            "name": "Example CPU @ 2.4 GHz",
            "missing": "",
            "simulated": False,
        },
        "rung": "L0",
        "seed": 0,
        "candidates": [],
        "environment": {
            "python": "3.11.7",
            "platform": "Linux-6.1-x86_64",
            "num_cores": 2,
            "num_threads": 2,
            "packages": {"torch": "2.13.0+cpu", "numpy": "2.4.6", "pytest": "9.2.0"},
            "cuda": None,
            "driver": None,
            "commit": "0f3c9a5d2b7e4c118a60d9f3e27b5a4c6d8e9f10",
            "dirty": [],
        },
        "flags": {
            "torch.get_float32_matmul_precision": "highest",
            "torch.are_deterministic_algorithms_enabled": "True",
            "cuda.matmul.allow_tf32": "False",
        },
        **others,
    }


def write(folder, records, run=None, selected=None, interrupted=False, errors=()):
    """Evidence from the run's line to its end, as the recorder writes it; not yet rendered."""
    run = run or run_line()
    selected = len(records) if selected is None else selected
    on_trial = [candidate["role"] for candidate in run["candidates"]]
    verdict, problems = run_verdict(records, selected, interrupted, errors, on_trial=on_trial)
    milestones = {}
    for made in records:
        milestones[made["milestone"]] = milestones.get(made["milestone"], 0) + 1
    with EvidenceWriter(folder) as writer:
        writer.append(run)
        for made in records:
            writer.append(made)
        writer.append(
            {
                "kind": "selection",
                "collected": milestones,
                "milestones": milestones,
                "selected": selected,
            }
        )
        writer.append(
            {
                "kind": "end",
                "verdict": verdict,
                "exit_status": exit_status(
                    verdict, run["selection"]["allow_incomplete"], interrupted
                ),
                "interrupted": interrupted,
                "errors": list(errors),
                "problems": problems,
                "finished": "2026-03-14T10:25:19+00:00",
                "duration_s": 192.4,
            }
        )
    return folder


def small(folder, **others):
    """Three gates, one with cases and a curve, a fault and a benign variant: PASSED."""
    return write(folder, small_records(), **others)


def small_records():
    curve = {
        "name": "loss",
        "x": [1.0, 2.0, 3.0],
        "y": [5.5, 4.0, math.nan],
        "x_label": "update",
        "y_label": "nats per token",
    }
    bounded = {"at_most": 1e-12, "because": LINEAR}
    return [
        record("m0_ledger::test_count", measurement("parameters", 494032768, equal=494032768)),
        record(
            "m2_accumulation::test_partition",
            measurement("relative gradient error", 3e-16, **bounded),
            case="2",
        ),
        record(
            "m2_accumulation::test_partition",
            measurement("relative gradient error", 4e-13, **bounded),
            case="4",
            series=[curve],
        ),
        variant(
            "fault",
            "mean_of_means",
            "accumulate",
            "Divides each microbatch by its own count.",
            "huggingface/transformers PR#34191",
            "m2_accumulation::test_partition",
            measurement("relative gradient error", 1.25, **bounded),
            case="4",
        ),
        variant(
            "benign",
            "reversed_microbatches",
            "accumulate",
            "Takes the microbatches in reverse.",
            "another summation order",
            "m2_accumulation::test_partition",
            measurement("relative gradient error", 2e-16, **bounded),
            case="4",
        ),
    ]
