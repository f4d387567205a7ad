"""What the router knows of its nodes: their reports, what is placed on them, and whether they may
take a leg.

Refuses to own: which of those that may is chosen (router/placement.py), who belongs to the cluster
at all (router/membership/), and how a leg reaches a node (router/transport/).
"""
