"""How much of a prompt each node has cached: a radix tree over text, made exact by KV events."""
