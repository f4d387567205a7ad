// The view of the cluster: tiles, who hands over to whom, latency, nodes, roles.

import { age, byId, count, h, keyed, mark, rate, s, say, short, time } from "./dom.js";
import { bar, line } from "./charts.js";

const MOST_IN_FLOW = 6; // of a role; the table has all
const CARD = 66; // height of a node in the flow, as parts.css has it
const GAP = 8;

export function showCluster(picture, asks) {
  const latencies = latenciesOf(picture.requests);
  tiles(picture, latencies);
  flow(picture);
  latency(latencies);
  ladder(picture);
  nodes(picture, asks);
  roles(picture);
}

const sum = (values) => values.reduce((left, right) => left + right, 0);

/** The values at 50, 90 and 99 %; null is none. */
function percentiles(values) {
  const known = values.filter((value) => value !== null).sort((left, right) => left - right);
  return known.length ? [0.5, 0.9, 0.99].map((share) => known[Math.ceil(share * known.length) - 1]) : [];
}

function latenciesOf(requests) {
  return {
    ttft: percentiles(requests.map((request) => request.ttft_s)),
    interToken: percentiles(requests.map((request) => request.inter_token_s)),
    total: percentiles(requests.filter((request) => request.status < 400).map((request) => request.stages_s.total)),
  };
}

// What the pictures so far said, the newest last: charts are drawn of it.
const MOST_POINTS = 300;
const points = [];

function remember(picture, { ttft, interToken }) {
  const { requests = 0, output_tokens: tokens = 0 } = picture.counts;
  const point = { at: picture.now, counts: picture.counts, requests, tokens, ttft: ttft[0] ?? null, itl: interToken[0] ?? null };
  const last = points.at(-1);
  const passed = last ? point.at - last.at : 0;
  const per = (name) => (passed > 0 ? Math.max(0, point[name] - last[name]) / passed : 0);
  points.push({ ...point, requestsPerS: per("requests"), tokensPerS: per("tokens") });
  if (points.length > MOST_POINTS) points.shift();
}

const history = (name) => points.map((point) => point[name]);

function tiles(picture, latencies) {
  remember(picture, latencies);
  const { requestsPerS, tokensPerS } = points.at(-1);
  const { running = 0, waiting = 0, waiting_for_room: forRoom = 0, requests = 0, failed = 0 } = picture.counts;
  const shown = [
    { name: "Requests", value: rate(requestsPerS), unit: "/s", line: history("requestsPerS") },
    { name: "Output", value: rate(tokensPerS), unit: "tokens/s", line: history("tokensPerS") },
    { name: "Running", value: count(running), unit: running === 1 ? "request" : "requests", note: `${sum(picture.nodes.map((node) => node.legs))} streams on nodes` },
    { name: "Waiting", value: count(waiting), unit: "in queue", note: `${forRoom} for KV room`, alarm: waiting > 0 },
    { name: "First token", value: time(latencies.ttft[0]), unit: "p50", note: `p99 ${time(latencies.ttft[2])}` },
    { name: "Failed", value: count(failed), unit: "since start", note: `${count(requests)} ended`, alarm: failed > 0 },
  ];
  keyed(byId("tiles"), shown, (tile) => tile.name, makeTile, (element, tile) => {
    say(element.value, tile.value);
    say(element.unit, tile.unit);
    mark(element, "data-alarm", tile.alarm ? "yes" : null);
    if (tile.line) line(element.spark, tile.line, 0.2);
    else say(element.note, tile.note);
  });
}

function makeTile(tile) {
  const value = h("span.value");
  const unit = h("span.unit");
  const foot = tile.line ? s("svg", { class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" }) : h("span.note");
  const element = h("div.tile", {}, h("dt", {}, tile.name), h("dd", {}, h("span.figure", {}, value, " ", unit), foot));
  return Object.assign(element, { value, unit, spark: foot, note: foot });
}

const stateOf = (node) => (node.up ? "up" : node.flips_to ? "flipping" : node.draining ? "draining" : "down");
const other = (role) => (role === "prefill" ? "decode" : "prefill");
const breakerOf = (node) => node.breaker.state.replace("_", " ");
const isOpen = (node) => node.breaker.state !== "closed";
const kvShare = (node) => (node.load.total_blocks ? 1 - node.load.free_blocks / node.load.total_blocks : null);

function ofRole(picture, role) {
  const all = picture.nodes.filter((node) => node.role === role);
  return all.sort((left, right) => left.url.localeCompare(right.url, "en", { numeric: true }));
}

function flow(picture) {
  const sides = { prefill: ofRole(picture, "prefill"), decode: ofRole(picture, "decode") };
  const most = Math.max(1, ...Object.values(sides).map((side) => Math.min(side.length, MOST_IN_FLOW)));
  const height = most * (CARD + GAP) - GAP;
  const places = {};
  for (const [role, side] of Object.entries(sides)) {
    const shown = side.slice(0, MOST_IN_FLOW);
    const list = byId(`flow-${role}`);
    list.style.minHeight = `${height}px`;
    const top = (height - (shown.length * (CARD + GAP) - GAP)) / 2;
    shown.forEach((node, at) => { places[node.url] = top + at * (CARD + GAP) + CARD / 2; });
    keyed(list, shown, (node) => node.url, makeCard, showCard);
  }
  wires(picture, sides, places, height);
  const left = sum(Object.values(sides).map((side) => Math.max(0, side.length - MOST_IN_FLOW)));
  byId("flow-more").hidden = !left;
  say(byId("flow-more"), `${left} more nodes are in the table of nodes below.`);
}

function makeCard(node) {
  const name = h("span.name", { title: node.url }, h("bdi", {}, short(node.url)));
  const badge = h("span.badge");
  const kv = bar(`KV in use on ${short(node.url)}`);
  const legs = h("span.wide");
  const load = h("span");
  const facts = h("span.facts", {}, load, legs);
  const head = h("span.head", {}, h("span.dot", { "aria-hidden": "true" }), name, badge);
  return Object.assign(h("li.node", {}, head, kv, facts), { badge, kv, load, legs });
}

function showCard(element, node) {
  mark(element, "data-state", stateOf(node));
  say(element.badge, !node.up ? stateOf(node) : isOpen(node) ? `breaker ${breakerOf(node)}` : "");
  mark(element.badge, "title", (node.up ? node.breaker.reason : node.reason) || null);
  element.kv.show(kvShare(node));
  say(element.load, `${node.load.running} run · ${node.load.waiting} wait`);
  say(element.legs, ` · ${node.legs} ${node.legs === 1 ? "stream" : "streams"}`);
}

/** Prefill node, decode node and how often KV went from one to the other. */
function handOvers(requests) {
  const pairs = new Map();
  for (const { local, prefill, decode } of requests) {
    if (local || prefill === "-" || decode === "-") continue;
    const [, , times] = pairs.get(`${prefill} ${decode}`) ?? [prefill, decode, 0];
    pairs.set(`${prefill} ${decode}`, [prefill, decode, times + 1]);
  }
  return pairs.values();
}

function wires(picture, sides, places, height) {
  const svg = byId("wires");
  svg.setAttribute("viewBox", `0 0 100 ${height}`);
  svg.style.height = `${height}px`;
  const drawn = new Map();
  const few = sides.prefill.length * sides.decode.length <= 36;
  const pairs = few ? sides.prefill.flatMap((from) => sides.decode.map((to) => [from, to])) : [];
  for (const [from, to] of pairs) if (from.up && to.up) drawn.set(`${from.url} ${to.url}`, { from: from.url, to: to.url, kind: "idle", width: 1 });
  for (const [from, to, times] of handOvers(picture.requests)) {
    const width = 1.25 + Math.min(3, Math.log2(1 + times) * 0.35);
    drawn.set(`${from} ${to}`, { from, to, kind: "busy", width });
  }
  const visible = [...drawn.values()].filter((wire) => wire.from in places && wire.to in places);
  keyed(svg, visible, (wire) => `${wire.from} ${wire.to}`, () => s("g", {}, s("path", { class: "base" }), s("path", { class: "pulse" })), (group, wire) => {
    const [y1, y2] = [places[wire.from], places[wire.to]];
    mark(group, "class", wire.kind);
    for (const path of group.children) mark(path, "d", `M0 ${y1} C45 ${y1} 55 ${y2} 100 ${y2}`);
    mark(group.firstChild, "stroke-width", wire.width.toFixed(1));
    mark(group.lastChild, "stroke-width", Math.max(1.5, wire.width - 1).toFixed(1));
  });
}

function latency({ ttft, interToken, total }) {
  const rows = [["Time to first token", ttft], ["Between tokens, mean", interToken], ["Whole request", total]];
  keyed(byId("latency").tBodies[0], rows, (row) => row[0], ([name]) => h("tr", {}, h("th", { scope: "row" }, name), h("td.num"), h("td.num"), h("td.num")), (row, [, figures]) => {
    [0, 1, 2].forEach((at) => say(row.cells[at + 1], time(figures[at])));
  });
  chart("chart-ttft", history("ttft"));
  chart("chart-itl", history("itl"));
}

function chart(id, values) {
  line(byId(id), values, 0.001);
  const known = values.filter((value) => value !== null);
  say(byId(`${id}-now`), known.length ? `${time(known.at(-1))}, highest ${time(Math.max(...known))}` : "no request");
}

function nodes(picture, asks) {
  const rows = [...ofRole(picture, "prefill"), ...ofRole(picture, "decode")];
  const several = picture.workers > 1;
  say(byId("nodes-hint"), several ? `streams of all router processes; loads as their parent was last told; breakers: the worst that any sees` : `${rows.filter((node) => node.up).length} of ${rows.length} up`);
  keyed(byId("nodes").tBodies[0], rows, (node) => node.url, (node) => makeRow(node, asks), (row, node) => {
    row.node = node;
    mark(row, "data-state", stateOf(node));
    const partly = several && node.up_in > 0 && node.up_in < picture.workers;
    say(row.state, partly ? `up in ${node.up_in} of ${picture.workers}` : stateOf(node));
    say(row.why, node.up ? (isOpen(node) ? `breaker: ${breakerOf(node)}` : `for ${age(node.for_s)}`) : node.draining || node.flips_to ? (node.legs ? `ends ${node.legs} streams` : "idle") : node.reason);
    mark(row.why, "title", node.reason || null);
    const [, , load, legs, depth, room, , held, breaker] = row.cells;
    say(load, `${node.load.running} / ${node.load.waiting}`);
    say(legs, count(node.legs));
    say(depth, node.queue_depth.toFixed(1));
    say(room, `${percent(node.prompt_share)} / ${node.role === "decode" ? percent(node.limit_left) : "–"}`);
    row.kv.show(kvShare(node));
    mark(row.kv, "title", node.load.total_blocks ? `${node.load.free_blocks} of ${node.load.total_blocks} blocks of ${node.load.block_size} tokens are free` : null);
    say(held, count(node.held_blocks));
    say(breaker, breakerOf(node));
    mark(breaker, "data-open", isOpen(node) ? "yes" : null);
    mark(breaker, "title", node.breaker.reason || null);
    const drained = node.draining;
    say(row.button, drained ? "Undrain" : "Drain");
    mark(row.button, "aria-label", `${drained ? "Undrain" : "Drain"} ${node.role} node ${short(node.url)}`);
    say(row.facts, [node.role, node.kind === "kvrelay" ? "" : node.kind, node.model, ...node.adapters].filter(Boolean).join(" · "));
    const wanted = node.flips_to ? node.role : other(node.role);
    row.flip.hidden = node.kind !== "kvrelay" || drained;
    say(row.flip, node.flips_to ? `Keep ${wanted}` : `Make ${wanted}`);
    mark(row.flip, "aria-label", `${node.flips_to ? "Keep" : "Make"} ${wanted}: ${node.role} node ${short(node.url)}`);
  });
}

function makeRow(node, asks) {
  const state = h("span.word");
  const why = h("span.why");
  const kv = bar(`KV in use on ${short(node.url)}`);
  const button = h("button.quiet", { type: "button", onclick: () => asks.drain(row.node) });
  const flip = h("button.quiet", { type: "button", onclick: () => asks.role(row.node) });
  const facts = h("span.why");
  const row = h("tr", {},
    h("th", { scope: "row" }, h("span.name", { title: node.url }, short(node.url)), facts),
    h("td", {}, h("span.dot", { "aria-hidden": "true" }), state, why),
    h("td.num"), h("td.num"), h("td.num"), h("td.num"), h("td", {}, kv), h("td.num"), h("td.breakers"), h("td.act", {}, flip, " ", button));
  return Object.assign(row, { state, why, kv, button, flip, facts });
}

// The rungs of wire/ladder.py, from what was found to what no cache could have had.
const RUNGS = {
  gpu: "found on the GPU",
  host: "found in host memory",
  store: "found in files",
  peer: "found on another node",
  failed: "the read failed or was late",
  stale: "the node had it no more",
  evicted: "evicted before the start",
  placement: "held elsewhere, not taken",
  capacity: "evicted long ago",
  forgotten: "seen very long ago",
  new: "never seen",
};
const FOUND = ["gpu", "host", "store", "peer"];

function ladder(picture) {
  const then = points[0];
  const rows = Object.keys(RUNGS).map((rung) => [rung, Math.max(0, (picture.counts[rung] || 0) - (then.counts[rung] || 0))]);
  const all = sum(rows.map(([, tokens]) => tokens));
  const possible = all - rows.at(-1)[1];
  byId("ladder-card").hidden = !all;
  const found = sum(rows.filter(([rung]) => FOUND.includes(rung)).map(([, tokens]) => tokens));
  const rateOf = possible ? `, ${percent(found / possible)} of those that a cache could have had` : "";
  say(byId("ladder-hint"), `${count(all)} tokens of prompts in ${age(picture.now - then.at)}${rateOf}`);
  keyed(byId("ladder"), rows, ([rung]) => rung, makeRung, (element, [, tokens]) => {
    element.bar.show(all ? tokens / all : 0);
    say(element.tokens, ` ${count(tokens)}`);
  });
}

function makeRung([rung]) {
  const share = bar(`Share of prompts: ${RUNGS[rung]}`);
  const tokens = h("span.num");
  return Object.assign(h("div", {}, h("dt", {}, `${rung}: ${RUNGS[rung]}`), h("dd", {}, share, tokens)), { bar: share, tokens });
}

const percent = (share) => `${Math.round(share * 100)} %`;

function roles(picture) {
  const models = picture.roles;
  byId("roles-card").hidden = !models.length;
  const rows = models.flatMap((each) => [
    [`${each.model} now`, each.why],
    ...Object.entries(each.use).map(([role, use]) => [`${each.model} ${role}`, percent(use)]),
  ]);
  keyed(byId("roles"), rows, (row) => row[0], ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (row, [, text]) => say(row.lastChild, text));
}
