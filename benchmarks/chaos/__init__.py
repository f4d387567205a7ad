"""Chaos: faults at random on a cluster of real processes with hundreds of streams (`python -m benchmarks.chaos`).

Owns the faults (faults.py), the processes (processes.py), what is asked (asks.py, model.py), how an answer is read and
compared with its undisturbed twin (streams.py), who asks (crowd.py), what is held at the end (left_behind.py), the
verdict (verdict.py) and how it is told (report.py). The router is never killed here.
"""
