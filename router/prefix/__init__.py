"""The index of cached prompts: a radix tree over text, made exact by the KV events of nodes."""
