"""One request from its first leg to its last byte: places taken, legs opened, tried again,
continued elsewhere.

Refuses to own: the socket of the client (router/relay.py), the way to a node (router/transport/), and
the choice (router/placement.py).
"""
