// Small lines and bars, drawn in the units of their own figures and stretched to their place.

import { h, s, say } from "./dom.js";

/** A line with an area under it, in an <svg>. Gaps (null) are gaps, and a value between two of them is a dot. `top` is the least that its top stands for. */
export function line(svg, values, top) {
  const width = Math.max(1, values.length - 1);
  const most = Math.max(top, ...values.map((value) => value ?? 0)) * 1.08;
  svg.setAttribute("viewBox", `0 0 ${width} 100`);
  if (!svg.firstChild) svg.append(s("path", { class: "area" }), s("path", { class: "stroke" }), s("path", { class: "dots" }));
  let stroke = "";
  let dots = "";
  let area = "";
  let begun = -1;
  const y = (value) => (100 - (value / most) * 100).toFixed(1);
  values.forEach((value, at) => {
    if (value === null) return;
    const alone = begun < 0 && (values[at + 1] ?? null) === null;
    if (alone) dots += `M${at} ${y(value)}l0.01 0`; // round caps make a dot of it
    else stroke += begun < 0 ? `M${at} ${y(value)}` : `L${at} ${y(value)}`;
    if (begun < 0) begun = at;
    if ((values[at + 1] ?? null) === null) {
      area += `M${begun} 100`;
      for (let back = begun; back <= at; back += 1) area += `L${back} ${y(values[back])}`;
      area += `L${at} 100Z`;
      begun = -1;
    }
  });
  [area, stroke, dots].forEach((path, at) => svg.children[at].setAttribute("d", path));
}

/** A bar of a share between 0 and 1, with its figure. */
export function bar(label) {
  const fill = h("span.fill");
  const text = h("span.num");
  const track = h("span.track", { role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100" }, fill);
  const element = h("span.meter", {}, track, text);
  element.show = (share) => {
    const known = share !== null;
    const percent = known ? Math.round(share * 100) : 0;
    fill.style.width = `${percent}%`;
    track.setAttribute("aria-valuenow", String(percent));
    track.dataset.level = percent >= 95 ? "full" : "";
    say(text, known ? `${percent} %` : "–");
  };
  return element;
}

// The stages of openai_api/stages.py that lie one behind the other; `transfer` runs beside the prefill, and
// `first_step` is the beginning of `decode`.
export const STAGES = [
  ["queue", "queue", "waiting for a node and a seat on it"],
  ["prefill", "prefill", "computing the prompt, first token included"],
  ["hand", "hand-over", "what the hand-over adds: news, rest of the fetch, a seat on the decode node"],
  ["decode", "decode", "all decode steps"],
  ["other", "other", "between the stages: network, router, client"],
];

export function inTurn(stages) {
  const of = (name) => stages[name] || 0;
  const parts = {
    queue: of("queue"),
    prefill: of("prefill"),
    hand: of("announce") + of("exposed") + of("decode_queue"),
    decode: of("decode") || of("first_step"),
  };
  const total = of("total");
  parts.other = Math.max(0, total - parts.queue - parts.prefill - parts.hand - parts.decode);
  return parts;
}

/** The stages of one request as a bar. */
export function stageBar(stages, shown) {
  const parts = inTurn(stages);
  const sum = Object.values(parts).reduce((left, right) => left + right, 0) || 1;
  const said = [];
  const element = h("span.stages", { role: "img" });
  for (const [name, title] of STAGES) {
    if (!parts[name]) continue;
    const piece = h("span", { title: `${title} ${shown(parts[name])}`, "data-stage": name });
    piece.style.width = `${(parts[name] / sum) * 100}%`;
    element.append(piece);
    said.push(`${title} ${shown(parts[name])}`);
  }
  element.setAttribute("aria-label", said.join(", "));
  return element;
}
