"""Fuzz: what strangers, clients and members of the cluster may send to every port (`python -m
tests.soak.fuzz`).

Owns how messages are changed (mutations.py), what is valid to begin with (examples.py), the
processes and what must stay as it is in them (stand.py), HTTP (over_http.py) and all other sockets
(over_sockets.py). A round is a function of (seed, number, target), so each can be played again
alone. Streams under faults are tests/soak/chaos.
"""
