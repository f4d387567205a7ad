"""Goodput of four GPUs, as prefill and decode nodes and as colocated servers (`python -m
benchmarks.goodput`).

Owns what is compared with what (works.py), the processes of it (nodes.py), which rates are tried
and what is kept of them (measuring.py), and the table and the plot of all that was kept
(drawing.py). The client and its measures are `kvrelay bench`'s, and each file that is written is
one of its results.
"""
