"""openai: an answer, a stream, a tool call, an object, a streamed response and an error. Prints what came, as JSON."""

import json
import sys

import openai
from pydantic import BaseModel, Field

url, key, model, call = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
hello = [{"role": "user", "content": "Say hello."}]
add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}  # fmt: skip
chat = client.chat.completions
whole = chat.create(model=model, messages=hello, max_tokens=8, temperature=0)
stream = chat.create(model=model, messages=hello, max_tokens=8, temperature=0, stream=True)
chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
# A small model seldom calls a tool of its own accord: it is held to the text of a call.
held = {"structured_outputs": {"choice": [call]}}
(called,) = chat.create(model=model, messages=hello, tools=[add], extra_body=held).choices[0].message.tool_calls
person = chat.parse(model=model, messages=hello, response_format=Person, max_tokens=60, temperature=0)
with client.responses.stream(model=model, input="Say hello.", temperature=0) as events:
    kinds = [event.type for event in events]
    said = events.get_final_response().output_text
try:
    chat.create(model="nobody", messages=hello)
    refused = ""
except openai.NotFoundError as why:
    refused = str(why)
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "chunks": chunks,
            "tokens": whole.usage.completion_tokens,
            "called": [called.function.name, json.loads(called.function.arguments)],
            "object": person.choices[0].message.parsed.model_dump(),
            "kinds": kinds,
            "said": said,
            "refused": refused,
        }
    )
)
