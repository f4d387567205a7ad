"""What the scripts share: their arguments, what they ask for, and how they print what came."""

import json
import sys
from typing import Any

from pydantic import BaseModel, Field

url, key, model = sys.argv[1:]
HELLO = "Say hello."
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"The sum of {a} and {b} is {a + b}."


def show(**found: Any) -> None:
    """Print what came, as JSON."""
    print(json.dumps(found))
