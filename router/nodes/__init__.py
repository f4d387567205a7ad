"""What the router knows of its nodes: their reports, depth and rates, whether they may take a leg, and room by credit.

Refuses to own: which of those that may is chosen (router/policies/), who belongs to the cluster at all
(router/membership/), and how a leg reaches a node (router/legs/).
"""
