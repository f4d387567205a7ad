"""What a cluster is asked, and how it is measured by whoever asks.

Owns workloads, arrivals, the client that puts them to any OpenAI server, and the figures of what it
sees; knows nothing of nodes and routers. What is typed and shown is the command line's.
"""
