"""instructor: an object by a tool call and by JSON schema."""

import instructor
from common import Person, key, model, show, url
from openai import OpenAI

found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=mode
    )
    person = client.chat.completions.create(
        model=model,
        response_model=Person,
        max_retries=0,
        temperature=0,
        max_tokens=80,
        messages=[{"role": "user", "content": "Describe a person."}],
    )
    found[mode.value] = person.model_dump()
show(**found)
