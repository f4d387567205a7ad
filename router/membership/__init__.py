"""Ways in which the router learns who belongs to the cluster: heartbeats, and the pods of
Kubernetes.

Refuses to own: what a member is like and whether it may take a leg (router/nodes/).
"""
