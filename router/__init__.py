"""The OpenAI endpoint users see: choice of nodes, the two legs of a request, fail-over, health,
metrics.

Moves bytes and decides; computes no token. Never imports torch, numpy or a tokenizer: it starts in
under a second.
"""
