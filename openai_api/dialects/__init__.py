"""Dialects beside chat completions: the Responses API, Anthropic's messages, vLLM's token ids."""
