"""Beside the wrappers, and not one of them: what they cost."""
