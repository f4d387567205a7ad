"""How a node is chosen: one policy per file, each a pure function of what is asked and what is known of the nodes.

Refuses to own: which nodes may be chosen at all (router/nodes/pool.py), and any socket, clock or random source.
"""
