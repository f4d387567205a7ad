"""llm: an answer by its command; a stream, a tool call, an object and an error in Python."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
import openai
from common import HELLO, Person, add, key, model, show, url

folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name  # where it looks for what follows
ours = {
    "api_base": f"{url}/v1",
    "api_key_name": "kvrelay",
    "supports_schema": True,
    "supports_tools": True,
}
models = [{"model_id": each, "model_name": each, **ours} for each in (model, "nobody")]
Path(folder.name, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML, too
Path(folder.name, "keys.json").write_text(json.dumps({"kvrelay": key}))

ask = {"temperature": 0}
command = [
    sys.executable,
    "-m",
    "llm",
    HELLO,
    "-m",
    model,
    "-o",
    "temperature",
    "0",
    "-o",
    "max_tokens",
    "8",
]
whole = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.removesuffix(
    "\n"
)
chat = llm.get_model(model)
streamed = chat.prompt(HELLO, max_tokens=8, **ask)
(called,) = chat.prompt(HELLO, tools=[add], **ask).tool_calls()
person = chat.prompt("Describe a person.", schema=Person, max_tokens=60, **ask)
try:
    llm.get_model("nobody").prompt(HELLO, **ask).text()
    refused = ""
except openai.NotFoundError as why:
    refused = str(why)
show(
    whole=whole,
    chunks=list(streamed),
    tokens=streamed.usage().output,
    called=[called.name, called.arguments],
    object=Person.model_validate_json(person.text()).model_dump(),
    refused=refused,
)
