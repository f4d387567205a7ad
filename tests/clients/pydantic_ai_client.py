"""pydantic-ai: an answer, a stream, an agent that calls a tool, an object and an error."""

from common import HELLO, Person, add, key, model, show, url
from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

asked = []


def adding(a: int, b: int) -> str:
    """Add two numbers."""
    asked.append(["add", {"a": a, "b": b}])
    return add(a, b)


provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
settings = {"temperature": 0, "max_tokens": 60}
agent = Agent(OpenAIChatModel(model, provider=provider), model_settings=settings)
short = {"model_settings": {**settings, "max_tokens": 8}}
whole = agent.run_sync(HELLO, **short)
chunks = list(agent.run_stream_sync(HELLO, **short).stream_text(delta=True, debounce_by=None))
adder = Agent(agent.model, tools=[Tool(adding, name="add")], model_settings=settings)
assert adder.run_sync(HELLO).output
(called,) = asked
person = agent.run_sync("Describe a person.", output_type=NativeOutput(Person))
try:
    Agent(OpenAIChatModel("nobody", provider=provider)).run_sync(HELLO)
    refused = ""
except ModelHTTPError as why:
    refused = str(why)
show(
    whole=whole.output,
    chunks=chunks,
    tokens=whole.usage.output_tokens,
    called=called,
    object=person.output.model_dump(),
    refused=refused,
)
