"""The OpenAI protocol for servers: requests, answers, tokenizing, chat templates, detokenizing,
stop strings, tools, reasoning, SSE.

Knows no engine, no socket and no other node, and never imports torch. The light parts (types, body,
not_built, sse) stand apart from tokenizer code, so that the router never loads that.
"""
