"""One model on one node: weights, paged KV, prefix cache, scheduler, sampler and steps.

Knows nothing of HTTP, text or other nodes.
"""
