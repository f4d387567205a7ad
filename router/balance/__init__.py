"""Nodes get the role that is short of them: what is measured for that, when it is looked at, and what changes then.

Refuses to own: when a change is worth it (planning/balance.py), and how a node changes (node/role.py).
"""
