"""The page at /docs: reads /openapi.json and shows it. One text, without anything from another
host.
"""

from __future__ import annotations

__all__ = ["DOCS_PAGE"]

DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>API</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; }
  code, .method { font-family: ui-monospace, monospace; }
  .method { display: inline-block; width: 4.5rem; font-weight: bold; text-transform: uppercase; }
  .get { color: #07508f; } .post { color: #1c6b2a; } .delete { color: #a3241d; }
  table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; }
  td { border-top: 1px solid #e4e4e4; padding: .2rem .6rem .2rem 0; vertical-align: top; }
  td:first-child { width: 16rem; }
  .about { color: #666; }
  @media (prefers-color-scheme: dark) {
    body { background: #161616; color: #ddd; } details { border-color: #444; } td { border-color: #333; }
    .get { color: #7db8ee; } .post { color: #7fce8d; } .delete { color: #ee8a83; } .about { color: #999; }
    a { color: #7db8ee; }
  }
</style>
</head>
<body>
<h1 id="title">API</h1>
<p class="about">From <a href="openapi.json">openapi.json</a>.</p>
<main></main>
<script>
const LIMITS = ["minimum", "exclusiveMinimum", "maximum", "minLength", "minItems", "maxProperties", "default"];
let schemas = {};

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function named(schema) {
  return schema.$ref ? schema.$ref.split("/").pop() : null;
}

function typed(schema) {
  if (schema.$ref) return named(schema);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typed).join(" | ");
  if (schema.type === "array") return "list of " + (schema.items ? typed(schema.items) : "anything");
  return schema.type || "anything";
}

function limits(schema) {
  return LIMITS.filter((name) => schema[name] !== undefined && schema[name] !== null)
    .map((name) => name + " " + JSON.stringify(schema[name])).join(", ");
}

function fields(schema) {
  const table = element("table");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = table.insertRow();
    row.insertCell().append(element("code", name), (schema.required || []).includes(name) ? " *" : "");
    row.insertCell().append(typed(field), element("span", " " + limits(field), "about"));
  }
  return table;
}

function refs(schema, found) {
  if (!schema || typeof schema !== "object") return found;
  const name = named(schema);
  if (name && !found.includes(name)) { found.push(name); refs(schemas[name], found); }
  for (const value of Object.values(schema)) refs(value, found);
  return found;
}

function part(title, schema) {
  const box = element("div");
  box.append(element("h4", title + ": " + typed(schema)));
  for (const name of refs(schema, [])) {
    const inner = element("details");
    const about = element("div", schemas[name].description || "", "about");
    inner.append(element("summary", name), about, fields(schemas[name]));
    box.append(inner);
  }
  return box;
}

function operation(method, path, said) {
  const box = element("details");
  const head = element("summary");
  head.append(element("span", method, "method " + method), element("code", path), " " + (said.summary || ""));
  box.append(head, element("p", said.description || ""));
  for (const each of said.parameters || []) {
    const what = typed(each.schema) + " " + limits(each.schema);
    box.append(element("p", each.in + " parameter " + each.name + ": " + what));
  }
  if (said.requestBody) box.append(part("Body", said.requestBody.content["application/json"].schema));
  for (const [status, answer] of Object.entries(said.responses)) {
    for (const [media, content] of Object.entries(answer.content || {})) {
      box.append(part(status + " " + media, content.schema));
    }
  }
  return box;
}

fetch("openapi.json").then((answer) => answer.json()).then((api) => {
  schemas = api.components.schemas;
  document.title = api.info.title;
  document.getElementById("title").textContent = api.info.title + " " + api.info.version;
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, said] of Object.entries(methods)) {
      document.querySelector("main").append(operation(method, path, said));
    }
  }
});
</script>
</body>
</html>
"""
