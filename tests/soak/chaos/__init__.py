"""Chaos (`python -m tests.soak.chaos`): faults at random on real processes with many streams.

Owns the faults: which come when (faults.py), and how each is done (strikes.py): to processes
(processes.py), to their network (proxies.py), to their logs (logs.py), their clocks (shim.py), by
clients (rude.py). Owns what is asked (asks.py, model.py) and who asks
(crowd.py), how an answer is read and compared with its undisturbed twin (streams.py), what is seen
meanwhile (lookout.py) and held at the end (left_behind.py), one run of it all (run.py),
the verdict (verdict.py) and how it is told (report.py).
"""
