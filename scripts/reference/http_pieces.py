"""The routes and their bodies, from the OpenAPI document, and the fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.openai_api.body import REFUSED
from kvrelay.openai_api.dialects.base import PASSED_ON
from kvrelay.openai_api.openapi import document
from kvrelay.openai_api.stages import STAGES
from scripts.reference.markdown import code, table

__all__ = ["http_pieces"]

Schema = Mapping[str, Any]

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "not empty",
    "maxLength": "at most {} characters",
    "minItems": "not empty",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} members",
}


def http_pieces() -> dict[str, str]:
    told = document("kvrelay", "")
    schemas: Schema = told["components"]["schemas"]
    routes = [
        [
            code(f"{method.upper()} {path}"),
            f"{said['summary']}.",
            "yes" if said.get("security") else "",
            _body(said),
        ]
        for path, methods in told["paths"].items()
        for method, said in methods.items()
    ]
    return {
        "routes": table(["Route", "What it does", "Key", "Body"], routes),
        "bodies": "\n".join(_schema(name, schemas[name]) for name in sorted(schemas)),
        "stages": ", ".join(code(f"{name}_ms") for name in STAGES) + ".",
        "passed-on": ", ".join(map(code, PASSED_ON)) + ".",
        "not-served": table(["Field", "Allowed", "Instead"], map(_refused, REFUSED)),
    }


def _refused(name: str) -> list[str]:
    harmless, instead = REFUSED[name]
    return [code(name), ", ".join(code(json.dumps(each)) for each in (None, *harmless)), instead]


def _body(said: Schema) -> str:
    return (
        _typed(said["requestBody"]["content"]["application/json"]["schema"])
        if "requestBody" in said
        else ""
    )


def _schema(name: str, schema: Schema) -> str:
    told = " ".join(str(schema.get("description", "")).split())
    head = f"### {name}\n\n" + (f"{told}\n\n" if told else "")
    if "properties" not in schema:
        return f"{head}One of {', '.join(code(each) for each in schema.get('enum', ()))}.\n"
    required = schema.get("required", ())
    rows = (
        [code(field), _typed(each), "yes" if field in required else "", _limits(each)]
        for field, each in schema["properties"].items()
    )
    return head + table(["Field", "Type", "Required", "Limits"], rows)


def _limits(schema: Schema) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    limits = {name: kind[name] for kind in reversed(kinds) for name in _LIMITS if name in kind}
    words = [text.format(code(limits[name])) for name, text in _LIMITS.items() if name in limits]
    if schema.get("default") not in (None, [], {}):
        words.append(f"default {code(json.dumps(schema['default']))}")
    if schema.get("description"):
        words.append(str(schema["description"]))
    return ", ".join(dict.fromkeys(words))


def _typed(schema: Schema) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return " or ".join(code(json.dumps(each)) for each in schema["enum"] if each is not None)
    if "anyOf" in schema:
        return " or ".join(
            each for each in dict.fromkeys(map(_typed, schema["anyOf"])) if each != "null"
        )
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_typed(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and schema.get("additionalProperties"):
        return f"object of {_typed(schema['additionalProperties'])}"
    return kind
