"""Admission of requests: keys and their limits, fair queues, TTFT and TPOT targets, Retry-After."""
