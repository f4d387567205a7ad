"""litellm: a whole answer, a stream, and an error in its own classes. Prints what came, as JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices is on a host of its own

import litellm

url, key, model = sys.argv[1:]
litellm.telemetry = False
to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "max_retries": 0, "temperature": 0}
hello = [{"role": "user", "content": "Say hello."}]
whole = litellm.completion(messages=hello, max_tokens=8, **to)
chunks = [
    part.choices[0].delta.content or "" for part in litellm.completion(messages=hello, max_tokens=8, stream=True, **to)
]
try:
    litellm.completion(messages=hello, **{**to, "model": "openai/nobody"})
    refused = ""
except litellm.NotFoundError as why:
    refused = str(why)
print(
    json.dumps(
        {
            "chunks": chunks,
            "whole": whole.choices[0].message.content,
            "tokens": whole.usage.completion_tokens,
            "refused": refused,
        }
    )
)
