// The view of requests that have ended: a table with the stages of each, the newest first.

import { byId, bytes, clock, count, h, keyed, mark, say, short, time } from "./dom.js";
import { STAGES, stageBar } from "./charts.js";

const MOST = 500; // in this page; the router keeps fewer
const MOST_ROWS = 100;

let known = new Map();
let shown = []; // what the table is made of: held while a request is open
let opened = null;
let find = "";
let which = "all";

const keyOf = (request) => `${request.id} ${request.ended}`;

export function startRequests() {
  byId("find").addEventListener("input", (event) => { find = event.target.value.trim().toLowerCase(); draw(); });
  byId("which").addEventListener("change", (event) => { which = event.target.value; draw(); });
  for (const [name, title, about] of STAGES) {
    byId("legend").append(h("li", { title: about }, h("span.swatch", { "data-stage": name, "aria-hidden": "true" }), title));
  }
}

export function takeRequests(requests) {
  let news = false;
  for (const request of requests) {
    if (!known.has(keyOf(request))) {
      known.set(keyOf(request), request);
      news = true;
    }
  }
  if (!news) return;
  const ordered = [...known.values()].sort((left, right) => right.ended - left.ended).slice(0, MOST);
  known = new Map(ordered.map((request) => [keyOf(request), request]));
  if (opened === null) shown = ordered;
  draw();
}

function wanted(request) {
  if (which === "failed" && request.status < 400) return false;
  if (!find) return true;
  return [request.id, request.model, request.key, request.prefill, request.decode, request.path, String(request.status)]
    .some((text) => text.toLowerCase().includes(find));
}

function draw() {
  const rows = shown.filter(wanted);
  if (which === "slow") rows.sort((left, right) => (right.stages_s.total || 0) - (left.stages_s.total || 0));
  const held = known.size - shown.length;
  const text = `${Math.min(rows.length, MOST_ROWS)} of the last ${shown.length}`;
  say(byId("requests-hint"), opened !== null && held > 0 ? `${text}; newer ones, held back while one is open: ${held}` : text);
  byId("log-empty").hidden = rows.length > 0;
  say(byId("log-empty"), shown.length ? "No request fits." : "No request has ended yet. Ask something under Chat.");
  const lines = rows.slice(0, MOST_ROWS).flatMap((request) => (keyOf(request) === opened ? [{ request }, { request, detail: true }] : [{ request }]));
  keyed(byId("log").tBodies[0], lines, (each) => (each.detail ? "detail " : "") + keyOf(each.request), make, (row, each) => {
    if (each.detail) return;
    const isOpen = keyOf(each.request) === opened;
    mark(row.button, "aria-expanded", String(isOpen));
    mark(row, "data-open", isOpen ? "yes" : null);
  });
}

function make({ request, detail }) {
  if (detail) return h("tr.detail", {}, h("td", { colspan: "9" }, details(request)));
  const button = h("button.id", { type: "button", title: request.id, "aria-expanded": "false" }, request.id);
  const bad = request.status >= 500 ? "bad" : request.status >= 400 ? "odd" : null;
  const row = h("tr", { onclick: () => toggle(request) },
    h("td.at", {}, clock(request.ended)),
    h("th", { scope: "row" }, button, h("span.why", {}, `${request.model || "–"} · ${request.key}`)),
    h("td.num", { "data-status": bad }, request.status === 499 ? "left" : String(request.status)),
    h("td.num", { title: "of the prompt, and generated" }, `${count(request.prompt_tokens)} → ${count(request.output_tokens)}`),
    h("td.num", {}, time(request.ttft_s)), h("td.num", {}, time(request.inter_token_s)), h("td.num", {}, time(request.stages_s.total)),
    h("td.why", {}, request.placed),
    h("td", {}, stageBar(request.stages_s, time)));
  return Object.assign(row, { button });
}

function toggle(request) {
  opened = opened === keyOf(request) ? null : keyOf(request);
  if (opened === null) shown = [...known.values()];
  draw();
}

// What each of them is, where it begins behind which others, and its colour.
const TOLD = [
  ["queue", "queue", "waiting for a node and for a seat on it"],
  ["prefill", "prefill", "computing the prompt, first token included"],
  ["announce", "hand", "from the first token until the decode node knows that the KV is complete"],
  ["transfer", "hand", "fetch of the KV, most of it beside the prefill"],
  ["exposed", "hand", "of the fetch, what came after the news that the KV is complete"],
  ["decode_queue", "hand", "on the decode node: waiting for a seat, blocks and the next step"],
  ["first_step", "decode", "first decode step (a part of decode)"],
  ["decode", "decode", "all decode steps"],
  ["total", "other", "arrival to end"],
];

/** When each stage began, as far as the stages tell: those in turn one behind the other. */
function begins(stages) {
  const of = (name) => stages[name] || 0;
  const at = { queue: 0, prefill: of("queue"), total: 0 };
  at.announce = at.prefill + of("prefill");
  at.exposed = at.announce + of("announce");
  at.decode_queue = at.exposed + of("exposed");
  at.transfer = Math.max(0, at.decode_queue - of("transfer"));
  at.first_step = at.decode = at.decode_queue + of("decode_queue");
  return at;
}

function details(request) {
  const total = request.stages_s.total || 1;
  const stages = h("table.figures.parts", {}, h("caption.unseen", {}, "Stages"));
  const body = stages.createTBody();
  const at = begins(request.stages_s);
  for (const [name, kind, about] of TOLD) {
    if (!(name in request.stages_s)) continue;
    const took = request.stages_s[name];
    const fill = h("span.span", { "data-stage": kind });
    const from = Math.min(99, (at[name] / total) * 100);
    fill.style.marginLeft = `${from}%`;
    fill.style.width = `${Math.min(100 - from, (took / total) * 100)}%`;
    body.append(h("tr", {}, h("th", { scope: "row" }, name.replace("_", " ")), h("td.num", {}, time(took)), h("td.wide", {}, fill), h("td.why", {}, about)));
  }
  const cached = request.cached_tokens ? `${count(request.cached_tokens)} of the prompt` : "none";
  const facts = [
    ["Request", request.id],
    ["Path", request.path + (request.stream ? ", streamed" : "")],
    ["Status", request.status === 499 ? "499, the client went away" : String(request.status)],
    request.error ? ["Error", request.error] : null,
    ["Prefill node", request.local ? "none: its decode node computed the prompt" : places(request.prefill)],
    ["Decode node", places(request.decode)],
    ["Cached tokens", cached],
    request.kv_bytes ? ["KV fetched", bytes(request.kv_bytes)] : null,
  ].filter(Boolean);
  return h("div.inside", {}, h("dl.counts", {}, ...facts.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)))), stages);
}

const places = (urls) => (urls === "-" ? "none" : urls.split(",").map(short).join(", "));
