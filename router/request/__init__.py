"""One request from its first attempt to its last byte.

Does not own the client's socket (router/relay.py), the way to a node (router/transport/), and the
choice of nodes (router/placement.py).
"""
