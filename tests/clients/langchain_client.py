"""langchain-openai: a structured answer and a stream. Prints what came, as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, key, model = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=60, max_retries=0)
person = chat.with_structured_output(Person, method="json_schema").invoke("Describe a person.")
chunks = [chunk.text for chunk in chat.bind(max_tokens=8).stream([("user", "Say hello.")])]
whole = chat.bind(max_tokens=8).invoke([("user", "Say hello.")])
usage = whole.usage_metadata
print(json.dumps({"age": person.age, "name": person.name, "chunks": chunks, "whole": whole.text, "usage": usage}))
