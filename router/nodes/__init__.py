"""Nodes as the router knows them: reports, load, requests that run there, and health.

Which node is chosen is router/placement.py's decision, who belongs to the cluster is found out in
router/membership/, and how a request reaches a node is router/transport/'s.
"""
