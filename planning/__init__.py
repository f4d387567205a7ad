"""How many nodes of which role: rate cards of nodes, and what follows from them for a workload.
Pure: no sockets, no clock, no torch.
"""
