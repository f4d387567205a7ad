"""kvrelay beside vLLM on the same GPUs, measured by vLLM's own client (`python -m benchmarks.peer`;
README.md).

Owns what is asked (works.py), what serves it (arms.py, servers.py, model.py), the client and what
it saw (client.py), the order of cells and their files (cells.py), and tables of those (table.py).
"""
