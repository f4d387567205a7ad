"""The prefill role: compute a prompt, sample its first token, keep the KV for a decode node."""
