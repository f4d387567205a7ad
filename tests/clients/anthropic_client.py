"""anthropic: models, a count of tokens, an answer, a stream, a tool call and an error. Prints what came, as JSON."""

import json
import sys

import anthropic

url, key, model, call = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}]}
whole = client.messages.create(max_tokens=8, temperature=0, **asked)
with client.messages.stream(max_tokens=8, temperature=0, **asked) as stream:
    chunks = list(stream.text_stream)
numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
add = {"name": "add", "input_schema": {"type": "object", "properties": numbers, "required": ["a", "b"]}}
# A small model seldom calls a tool of its own accord: it is held to the text of a call.
held = {"structured_outputs": {"choice": [call]}}
(called,) = client.messages.create(max_tokens=100, tools=[add], extra_body=held, **asked).content
try:
    client.messages.create(max_tokens=8, **{**asked, "model": "nobody"})
    refused = ""
except anthropic.NotFoundError as why:
    refused = str(why)
print(
    json.dumps(
        {
            "models": [each.id for each in client.models.list()],
            "counted": client.messages.count_tokens(**asked).input_tokens == whole.usage.input_tokens,
            "whole": whole.content[0].text,
            "chunks": chunks,
            "tokens": whole.usage.output_tokens,
            "called": [called.name, called.input],
            "refused": refused,
        }
    )
)
