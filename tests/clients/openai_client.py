"""openai: an answer, a stream, a tool call, an object, a streamed response and an error."""

import json

import openai
from common import ADD, HELLO, Person, key, model, show, url

client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
chat, hello = client.chat.completions, [{"role": "user", "content": HELLO}]
whole = chat.create(model=model, messages=hello, max_tokens=8, temperature=0)
stream = chat.create(model=model, messages=hello, max_tokens=8, temperature=0, stream=True)
chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
tools = [{"type": "function", "function": ADD}]
(called,) = chat.create(model=model, messages=hello, tools=tools).choices[0].message.tool_calls
person = chat.parse(
    model=model, messages=hello, response_format=Person, max_tokens=60, temperature=0
)
with client.responses.stream(model=model, input=HELLO, temperature=0) as events:
    kinds = [event.type for event in events]
    said = events.get_final_response().output_text
try:
    chat.create(model="nobody", messages=hello)
    refused = ""
except openai.NotFoundError as why:
    refused = str(why)
show(
    whole=whole.choices[0].message.content,
    chunks=chunks,
    tokens=whole.usage.completion_tokens,
    called=[called.function.name, json.loads(called.function.arguments)],
    object=person.choices[0].message.parsed.model_dump(),
    refused=refused,
    kinds=kinds,
    said=said,
)
