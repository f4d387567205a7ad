"""Requests to nodes, and how they fail."""
