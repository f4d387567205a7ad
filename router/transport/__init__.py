"""Requests to nodes: HTTP or one multiplexed stream per node, and how they fail.

Chooses no node and retries nothing (router/request/).
"""
