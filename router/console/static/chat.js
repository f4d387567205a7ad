// A playground: talks to the router's own OpenAI endpoint as any client does, and shows how fast the answer comes.

import * as api from "./api.js";
import { byId, count, h, say, time } from "./dom.js";
import { stageBar } from "./charts.js";

let messages = [];
let under = null; // the AbortController of an answer that comes

export function startChat() {
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  byId("stop").addEventListener("click", () => under?.abort());
  byId("forget").addEventListener("click", () => {
    under?.abort();
    messages = [];
    byId("turns").replaceChildren();
    byId("prompt").focus();
  });
  byId("api-key").addEventListener("change", () => loadModels());
}

/** Models to choose from, as the picture names them; with an API key, those that it may ask for. */
export function offerModels(names) {
  if (!byId("api-key").value) fill(names);
}

async function loadModels() {
  try { fill(await api.models(byId("api-key").value)); } catch (why) { say(byId("chat-status"), why.message); }
}

function fill(names) {
  const select = byId("model");
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function turn(role, text) {
  const words = h("div.words", {}, text);
  const element = h(`li.turn.${role}`, {}, h("span.who", {}, role === "user" ? "You" : byId("model").value || "Model"), words);
  byId("turns").append(element);
  return { element, words };
}

async function ask() {
  const text = byId("prompt").value.trim();
  if (!text || under) return;
  byId("prompt").value = "";
  turn("user", text);
  const asked = [...messages, { role: "user", content: text }];
  const mine = (under = new AbortController());
  busy(true);
  const answer = new Answer();
  try {
    await answer.come(asked, mine.signal);
    messages = [...asked, { role: "assistant", content: answer.text }];
    say(byId("chat-status"), `The answer is complete. ${answer.figures()}`);
  } catch (why) {
    answer.broken(mine.signal.aborted ? "stopped" : why.status === 401 ? `${why.message} (the field API key above)` : why.message);
    byId("prompt").value ||= text;
  } finally {
    if (under === mine) under = null;
    busy(false);
    byId("prompt").focus();
  }
}

function busy(yes) {
  byId("send").hidden = yes;
  byId("stop").hidden = !yes;
  if (yes) byId("stop").focus();
}

class Answer {
  constructor() {
    const { element, words } = turn("model", "");
    this.text = "";
    this.words = words;
    this.foot = h("p.foot", {}, h("span.num", {}, "waiting for the first token"));
    element.append(this.foot);
    this.tokens = 0;
    this.began = performance.now();
  }

  async come(asked, signal) {
    const temperature = byId("temperature").value;
    const body = {
      model: byId("model").value,
      messages: asked,
      stream: true,
      stream_options: { include_usage: true },
      include_metrics: true,
      ...(temperature === "" ? {} : { temperature: Number(temperature) }), // else it is the model's own
      max_tokens: Math.max(1, Math.round(Number(byId("max-tokens").value)) || 256),
    };
    for await (const event of api.chat(body, byId("api-key").value, signal)) {
      this.take(event);
    }
    this.ended = performance.now();
    this.show();
  }

  take(event) {
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content || delta.reasoning || "";
    const piece = thought + (delta.content || "");
    if (piece) {
      this.first ??= performance.now();
      this.last = performance.now();
      this.tokens += 1; // about one for each event, until the usage says it
      if (thought) this.words.append(h("span.thought", {}, thought));
      if (delta.content) {
        this.text += delta.content;
        this.words.append(delta.content);
      }
      this.follow();
    }
    if (event.usage) this.tokens = event.usage.completion_tokens;
    if (event.kvrelay) {
      this.stages = Object.fromEntries(Object.entries(event.kvrelay).filter(([name]) => name.endsWith("_ms")).map(([name, ms]) => [name.replace(/_ms$/, ""), ms / 1e3]));
    }
    this.show();
  }

  follow() {
    const list = byId("turns");
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
  }

  figures() {
    if (this.first === undefined) return "";
    const stream = (this.last - this.first) / 1e3;
    const speed = this.tokens > 1 && stream > 0 ? ` · ${((this.tokens - 1) / stream).toFixed(1)} tokens/s` : "";
    const whole = this.ended === undefined ? "" : ` · ${time((this.ended - this.began) / 1e3)}`;
    return `TTFT ${time((this.first - this.began) / 1e3)}${speed} · ${count(this.tokens)} tokens${whole}`;
  }

  show() {
    if (this.first === undefined) return;
    say(this.foot.firstChild, this.figures());
    if (this.stages && this.foot.children.length === 1) this.foot.append(stageBar(this.stages, time));
  }

  broken(why) {
    this.show();
    this.foot.append(h("span.bad", {}, this.first === undefined ? why : ` ${why}`));
    if (this.first === undefined) this.foot.firstChild.remove();
  }
}
