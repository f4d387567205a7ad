"""The decode role: take KV that a prefill node computed, and generate from the first token on."""
