"""Several router processes on one port: a parent owns membership, limits and metrics; and what is
said between them.

Refuses to own: anything about a request; a worker is the same router as a single process.
"""
