"""langchain-openai: an answer, a stream, a tool call, an object and an error."""

import openai
from common import HELLO, Person, add, key, model, show, url
from langchain_openai import ChatOpenAI

to = {"base_url": f"{url}/v1", "api_key": key, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(model=model, max_tokens=60, **to)
short, hello = chat.bind(max_tokens=8), [("user", HELLO)]
whole = short.invoke(hello)
(called,) = chat.bind_tools([add]).invoke(hello).tool_calls
try:
    ChatOpenAI(model="nobody", **to).invoke(hello)
    refused = ""
except openai.NotFoundError as why:
    refused = str(why)
show(
    whole=whole.text,
    chunks=[chunk.text for chunk in short.stream(hello)],
    tokens=whole.usage_metadata["output_tokens"],
    called=[called["name"], called["args"]],
    object=chat.with_structured_output(Person).invoke("Describe a person.").model_dump(),
    refused=refused,
)
