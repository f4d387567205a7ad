"""The OpenAI endpoint that users see: placement, requests to nodes, fail-over, health, metrics.

Never imports torch, numpy or a tokenizer: it starts in under a second.
"""
