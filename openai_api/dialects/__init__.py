"""Dialects beside chat completions: the Responses API and Anthropic's messages."""
