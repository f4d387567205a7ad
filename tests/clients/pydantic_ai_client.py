"""pydantic-ai: an answer, a stream, a tool call and an object. Prints what came, as JSON."""

import json
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, key, model, call = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def add(a: int, b: int) -> list[int]:
    """Add two numbers."""
    return [a, b]


provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
settings = {"temperature": 0, "max_tokens": 60}
agent = Agent(OpenAIChatModel(model, provider=provider), model_settings=settings)
short = {**settings, "max_tokens": 8}
whole = agent.run_sync("Say hello.", model_settings=short)
chunks = list(agent.run_stream_sync("Say hello.", model_settings=short).stream_text(delta=True, debounce_by=None))
# A small model seldom calls a tool of its own accord: it is held to the text of a call. As one of two kinds of output
# it ends the run, and the model may choose.
held = {"extra_body": {"structured_outputs": {"choice": [call]}}}
called = agent.run_sync("Say hello.", output_type=[add, str], model_settings=held)
person = agent.run_sync("Describe a person.", output_type=NativeOutput(Person))
try:
    Agent(OpenAIChatModel("nobody", provider=provider)).run_sync("Say hello.")
    refused = ""
except ModelHTTPError as why:
    refused = str(why)
print(
    json.dumps(
        {
            "whole": whole.output,
            "chunks": chunks,
            "tokens": whole.usage.output_tokens,
            "called": ["add", dict(zip("ab", called.output, strict=True))],
            "object": person.output.model_dump(),
            "refused": refused,
        }
    )
)
