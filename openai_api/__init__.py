"""The HTTP protocols: requests, answers, tokenizing, chat templates, tools, reasoning and SSE.

Never imports torch; what the router uses imports no tokenizer either.
"""
