"""The page at /console: a live snapshot of the cluster, and requests that have ended."""
