"""Wrong and excessive messages on every port: `python -m tests.soak.fuzz`.

A round is a function of (seed, number, target), so each can be played again alone.
"""
