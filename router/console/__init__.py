"""The page at /console and what it shows: a live picture of the cluster, and requests that have
ended.

Owns no state that anything else is decided by. Of requests it keeps no text: neither prompts nor
answers nor bodies.
"""
