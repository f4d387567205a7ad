"""anthropic: models, a count of tokens, an answer, a stream, a tool call, an object and an error."""

from typing import Literal

import anthropic
from common import ADD, HELLO, key, model, show, url
from pydantic import BaseModel


class Person(BaseModel):
    """A person. The library leaves limits of lengths and numbers out of a schema."""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
asked = {"model": model, "messages": [{"role": "user", "content": HELLO}]}
greedy = {"extra_body": {"temperature": 0}}
whole = client.messages.create(max_tokens=8, **greedy, **asked)
with client.messages.stream(max_tokens=8, **greedy, **asked) as stream:
    chunks = list(stream.text_stream)
tools = [{"name": ADD["name"], "input_schema": ADD["parameters"]}]
(called,) = client.messages.create(max_tokens=100, tools=tools, **asked).content
person = client.messages.parse(max_tokens=60, output_format=Person, **asked).parsed_output
try:
    client.messages.create(max_tokens=8, **{**asked, "model": "nobody"})
    refused = ""
except anthropic.NotFoundError as why:
    refused = str(why)
show(
    whole=whole.content[0].text,
    chunks=chunks,
    tokens=whole.usage.output_tokens,
    called=[called.name, called.input],
    object=person.model_dump(),
    refused=refused,
    models=[each.id for each in client.models.list()],
    # What others have had computed is not among the input tokens.
    counted=client.messages.count_tokens(**asked).input_tokens
    == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0),
)
