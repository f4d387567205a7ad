"""The load of a server: workloads, a client, and figures of the answers.

Works for any OpenAI server; knows nothing of nodes and routers.
"""
