"""How many nodes of which role: rate cards, an estimate by queueing theory, and a simulator.

The simulated router is the real one; nodes are simulated. No sockets, no clock, no torch.
"""
