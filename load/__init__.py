"""What a server is asked, the client that asks it, and the figures of what it answers.

Works for any OpenAI server; knows nothing of nodes and routers.
"""
