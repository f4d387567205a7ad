"""instructor: a pydantic object by a tool call and by JSON schema. Prints what came, as JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, key, model = sys.argv[1:]


class Address(BaseModel):
    """An address."""

    street: str = Field(max_length=12)
    number: int = Field(ge=1, le=999)


found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=mode)
    address = client.chat.completions.create(
        model=model,
        response_model=Address,
        max_retries=0,
        temperature=0,
        max_tokens=80,
        messages=[{"role": "user", "content": "Invent an address."}],
    )
    found[mode.value] = {"street": address.street, "number": address.number}
print(json.dumps(found))
