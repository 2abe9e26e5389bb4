"""The harness: runs gates through pytest, judges, and writes the evidence."""

from harness.contract import Stack, benign, fault, gate, not_run

__all__ = ["Stack", "benign", "fault", "gate", "not_run"]
