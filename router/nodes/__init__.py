"""Nodes as the router knows them: reports, load, requests that run there, and health."""
