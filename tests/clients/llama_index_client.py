"""llama-index: an answer, a stream, a tool call and an object. Prints what came, as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

url, key, model, call = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


llm = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key=key,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=60,
    max_retries=0,
)
hello = [ChatMessage(role="user", content="Say hello.")]
whole = llm.chat(hello, max_tokens=8)
chunks = [part.delta for part in llm.stream_chat(hello, max_tokens=8)]
# A small model seldom calls a tool of its own accord: it is held to the text of a call.
held = {"structured_outputs": {"choice": [call]}}
answer = llm.chat_with_tools([FunctionTool.from_defaults(add)], chat_history=hello, extra_body=held)
(called,) = llm.get_tool_calls_from_response(answer)
person = llm.structured_predict(Person, PromptTemplate("Describe a person."))
print(
    json.dumps(
        {
            "whole": whole.message.content,
            "chunks": chunks,
            "tokens": whole.raw.usage.completion_tokens,
            "called": [called.tool_name, called.tool_kwargs],
            "object": person.model_dump(),
        }
    )
)
