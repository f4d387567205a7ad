"""Who has how much of a prompt in its prefix cache: a radix tree over text, made exact by KV events
of the nodes.

Refuses to own: what that is worth against a queue (router/placement.py).
"""
