"""Who belongs to the cluster: told at the start, by heartbeats, by Kubernetes or by hand; one list of members for all.

Refuses to own: what a member is like and whether it may take a leg (router/nodes/).
"""
