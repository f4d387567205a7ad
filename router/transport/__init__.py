"""How one leg reaches one node and its answer comes back: HTTP or a leg stream, watched for
silence, cut without loss.

Refuses to own: which node it goes to and what follows when it breaks (router/request/).
"""
