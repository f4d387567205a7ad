"""vLLM's own nodes behind this router: what they are asked, what they answer, and the walk over two
of them.

Refuses to own: the choice of nodes and who is up (router/nodes/pool.py), and what the client sees
(router/relay.py). Frames are not known here: a vLLM node answers in OpenAI's bytes, and they go to
the client as they are.
"""
