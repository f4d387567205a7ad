"""Moves KV blocks between nodes: tickets, leases, handshake, connectors.

Knows nothing of requests, models or schedulers. Called by node/engine_process.py.
"""
