// Talks to the router that has served this page, and to nobody else. Owns the keys: they live in this tab.

const ADMIN = "kvrelay.admin-key";

export const keys = {
  admin: stored(),
  keep(key) {
    keys.admin = key;
    try {
      if (key) sessionStorage.setItem(ADMIN, key);
      else sessionStorage.removeItem(ADMIN);
    } catch (_) { /* storage is off: it lasts until the page is left */ }
  },
};

function stored() {
  try { return sessionStorage.getItem(ADMIN) || ""; } catch (_) { return ""; }
}

/** Take the admin key out of the address, where `kvrelay up` puts it; whether there was one. No server is ever sent
 * what stands behind the #, and here it does not stay in the address bar. */
export function takeKeyOfAddress() {
  const found = /^#key=([\w.~-]+)$/.exec(location.hash);
  if (found) {
    keys.keep(found[1]);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return found !== null;
}

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const bearer = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function checked(answer) {
  if (answer.ok) return answer;
  let error = { message: `the router answers ${answer.status}` };
  try { error = (await answer.json()).error; } catch (_) { /* not ours */ }
  throw new Refused(answer.status, error.message, error.code);
}

/** What there is to see. Gives up after `deadlineMs`. */
export async function state(deadlineMs) {
  const asked = { headers: bearer(keys.admin), cache: "no-store", signal: AbortSignal.timeout(deadlineMs) };
  return (await checked(await fetch("console/state", asked))).json();
}

/** Drain a node, or end that. */
export async function drain(url, begin) {
  const headers = { ...bearer(keys.admin), "content-type": "application/json" };
  const asked = { method: "POST", headers, body: JSON.stringify({ url }), signal: AbortSignal.timeout(15000) };
  return (await checked(await fetch(begin ? "admin/drain" : "admin/undrain", asked))).json();
}

/** Give a node another role; the one that it has calls a change off. `force`: also the last node of its role. */
export async function role(url, wanted, force) {
  const headers = { ...bearer(keys.admin), "content-type": "application/json" };
  const body = JSON.stringify({ url, role: wanted, force });
  const asked = { method: "POST", headers, body, signal: AbortSignal.timeout(15000) };
  return (await checked(await fetch("admin/nodes/role", asked))).json();
}

export async function models(key) {
  return (await (await checked(await fetch("v1/models", { headers: bearer(key) }))).json()).data.map((each) => each.id);
}

/** The events of a streamed chat completion, as JSON values. */
export async function* chat(body, key, signal) {
  const headers = { ...bearer(key), "content-type": "application/json" };
  const asked = { method: "POST", headers, body: JSON.stringify(body), signal };
  const answer = await checked(await fetch("v1/chat/completions", asked));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the answer broke off: the stream ended without [DONE]");
      left += value;
      let end;
      while ((end = left.indexOf("\n\n")) >= 0) {
        const event = left.slice(0, end);
        left = left.slice(end + 2);
        const said = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (said === "[DONE]") return;
        if (!said) continue;
        const told = JSON.parse(said);
        if (told.error) throw new Error(told.error.message || "the answer broke off");
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
