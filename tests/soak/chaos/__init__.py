"""Faults under load: `python -m tests.soak.chaos`."""
