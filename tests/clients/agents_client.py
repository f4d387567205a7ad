"""openai-agents over the Responses API: an agent that must call a tool, then answers. Prints what came, as JSON."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, key, name = sys.argv[1:]
asked = []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    asked.append([a, b])
    return str(a + b)


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    agent = Agent(
        name="adder",
        instructions="Use the tool to add numbers.",
        tools=[add],
        model=OpenAIResponsesModel(name, client),
        model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=40),
    )
    result = await Runner.run(agent, "What is 2 + 3?", max_turns=3)
    streamed = Runner.run_streamed(agent.clone(tools=[], model_settings=ModelSettings(temperature=0)), "Say hello.")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    print(json.dumps({"asked": asked, "said": result.final_output, "kinds": kinds, "hello": streamed.final_output}))


asyncio.run(main())
