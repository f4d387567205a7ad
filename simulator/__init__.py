"""A whole cluster on a virtual clock: the real pure cores of router and engine between simulated
nodes.

Owns no policy of its own.
"""
