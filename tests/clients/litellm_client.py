"""litellm: an answer, a stream, a tool call, an object, and an error in its own classes."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices is on a host of its own

import litellm
from common import ADD, HELLO, Person, key, model, show, url

litellm.telemetry = False
to = {
    "model": f"openai/{model}",
    "api_base": f"{url}/v1",
    "api_key": key,
    "max_retries": 0,
    "temperature": 0,
}
to["messages"] = [{"role": "user", "content": HELLO}]
whole = litellm.completion(max_tokens=8, **to)
chunks = [
    part.choices[0].delta.content or ""
    for part in litellm.completion(max_tokens=8, stream=True, **to)
]
answer = litellm.completion(tools=[{"type": "function", "function": ADD}], **to)
(called,) = answer.choices[0].message.tool_calls
person = litellm.completion(response_format=Person, max_tokens=60, **to).choices[0].message.content
try:
    litellm.completion(**{**to, "model": "openai/nobody"})
    refused = ""
except litellm.NotFoundError as why:
    refused = str(why)
show(
    whole=whole.choices[0].message.content,
    chunks=chunks,
    tokens=whole.usage.completion_tokens,
    called=[called.function.name, json.loads(called.function.arguments)],
    object=Person.model_validate_json(person).model_dump(),
    refused=refused,
)
