"""openai-agents over the Responses API: an agent that calls a tool and then answers, and a streamed
answer.
"""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import HELLO, add, key, model, show, url
from openai import AsyncOpenAI

asked = []


@function_tool(name_override="add")
def adding(a: int, b: int) -> str:
    """Add two numbers."""
    asked.append(["add", {"a": a, "b": b}])
    return add(a, b)


async def main() -> None:
    set_tracing_disabled(True)
    responses = OpenAIResponsesModel(
        model, AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    )
    agent = Agent(name="adder", model=responses, model_settings=ModelSettings(temperature=0))
    result = await Runner.run(agent.clone(tools=[adding]), "What is 2 + 3?", max_turns=2)
    streamed = Runner.run_streamed(agent, HELLO)
    kinds = [
        event.data.type
        async for event in streamed.stream_events()
        if event.type == "raw_response_event"
    ]
    show(asked=asked, said=result.final_output, kinds=kinds, hello=streamed.final_output)


asyncio.run(main())
