"""Whether and when a request may begin: keys and their limits, fair turns, TTFT and TPOT targets,
honest Retry-After.

Refuses to own: on which nodes it begins (router/request/).
"""
