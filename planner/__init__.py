"""How many nodes of which role: rate cards, an estimate by queueing theory, and a simulator.

No sockets, no clock, no torch.
"""
