"""One model on one node: weights, models, paged KV pool, prefix cache, scheduler, sampler, steps.

Knows nothing of HTTP, text or other nodes. Called by node/engine_process.py.
"""
