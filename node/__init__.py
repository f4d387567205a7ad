"""One node: an HTTP process and an engine process, whatever the role.

Owns the HTTP shell, the engine process with its connector, and their life cycle. What a role does
with a request stands in prefill_node and decode_node; the role is a run-time value.
"""
