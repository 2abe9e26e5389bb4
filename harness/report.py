"""Placeholder by the lead until the report room is written: replace this file."""


def render(directory):
    """Replace me."""
