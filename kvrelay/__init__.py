"""The command line and the local cluster: what a person types, and the processes that this starts.

Owns flags, config files and child processes. Knows nothing of requests, models or KV, and never imports torch.
"""
