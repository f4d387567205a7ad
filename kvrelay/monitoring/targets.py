"""What answers are held to: the numbers that the dashboards show as lines and the alerts fire on. Change them here.

Each must be a bound of its histogram's buckets (router/metrics.py), or no query could tell who met it.
"""

from __future__ import annotations

__all__ = ["AVAILABLE", "FIRST_TOKEN_S", "IN_TIME", "NEXT_TOKEN_S"]

AVAILABLE = 0.999
"""Share of requests that do not end with a 5xx."""
FIRST_TOKEN_S = 1.0
"""Seconds from a request's arrival to its first token."""
NEXT_TOKEN_S = 0.1
"""Seconds between tokens, mean of a request."""
IN_TIME = 0.95
"""Share of requests that are to meet either of the two."""
