// The page: asks the router for news once a second, and hands them to the views. Owns tabs, keys, colours and dialogs.

import * as api from "./api.js";
import { age, byId, mark, say, short } from "./dom.js";
import { offerModels, startChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { startRequests, takeRequests } from "./requests.js";

const EVERY_MS = 1000;
const DEADLINE_MS = 8000;
const MOST_WAIT_MS = 10000;
const VIEWS = ["cluster", "requests", "chat"];

let paused = false;
let timer = 0;
let failures = 0;
let asking = false;
let wantsKey = false;

async function look() {
  clearTimeout(timer);
  if (asking || paused || wantsKey || document.hidden) return;
  asking = true;
  try {
    const picture = await api.state(DEADLINE_MS);
    failures = 0;
    notice("");
    header(picture);
    showCluster(picture, { drain: askDrain, role: askRole });
    takeRequests(picture.requests);
    offerModels(Object.keys(picture.models));
  } catch (why) {
    failures += 1;
    if (why.status === 401) askKey(why.message);
    else {
      notice(why.status ? why.message : "The router does not answer. What is shown is old.");
      health("lost", "no answer");
    }
  } finally {
    asking = false;
  }
  if (!wantsKey) timer = setTimeout(look, Math.min(EVERY_MS * 2 ** Math.min(failures, 5), MOST_WAIT_MS));
}

function header(picture) {
  const said = { ok: "serving", degraded: "degraded: decode nodes answer alone", unavailable: "no model can be served" };
  health(picture.health, said[picture.health]);
  const processes = picture.wanted > 1 ? `, ${picture.workers} of ${picture.wanted} processes` : "";
  say(byId("about"), `${picture.version}, up ${age(picture.uptime_s)}${processes}`);
}

function health(state, text) {
  mark(byId("health"), "data-state", state);
  say(byId("health-text"), text);
}

function notice(text) {
  byId("notice").hidden = !text;
  say(byId("notice"), text);
}

// Keys.

function askKey(why) {
  wantsKey = true;
  health("lost", "key wanted");
  say(byId("key-why"), why);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function useKey() {
  wantsKey = false;
  byId("key-dialog").close();
  setTimeout(look, 0);
}

function startKeys() {
  const dialog = byId("key-dialog");
  byId("key").addEventListener("click", () => {
    say(byId("key-why"), api.keys.admin ? "A key is kept. Another one takes its place; an empty one forgets it." : "This page needs the router's admin key.");
    dialog.showModal();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", () => {
    api.keys.keep(byId("key-input").value.trim());
    byId("key-input").value = "";
    useKey();
  });
  dialog.addEventListener("close", () => {
    if (wantsKey) notice("Without the admin key there is nothing to show. The button Key asks for it again; Chat works.");
  });
}

// Draining.

let draining = null;

function askDrain(node) {
  if (node.draining) {
    drain(node, false);
    return;
  }
  draining = node;
  const left = { 0: "no stream is on it now", 1: "the stream on it goes on to its end" }[node.legs] || `the ${node.legs} streams on it go on to their end`;
  say(byId("drain-what"), `The ${node.role} node ${short(node.url)} will take nothing new; ${left}. Undrain brings it back.`);
  byId("drain-dialog").showModal();
}

function startDraining() {
  const dialog = byId("drain-dialog");
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "drain" && draining) drain(draining, true);
    draining = null;
    dialog.returnValue = "";
  });
}

async function drain(node, begin) {
  try {
    await api.drain(node.url, begin);
    look();
  } catch (why) {
    notice(`${short(node.url)} was not ${begin ? "drained" : "undrained"}: ${why.message}`);
  }
}

// Roles.

let changing = null;

function askRole(node) {
  const wanted = node.role === "prefill" ? "decode" : "prefill";
  if (node.flips_to) {
    giveRole({ node, wanted: node.role, force: false });
    return;
  }
  const first = node.legs ? `end the ${node.legs === 1 ? "stream" : `${node.legs} streams`} on it` : "end what it has";
  offerRole({ node, wanted, force: false }, `The ${node.role} node ${short(node.url)} will take nothing new, ${first}, and then be a ${wanted} node. It keeps its weights and its KV.`);
}

function offerRole(change, text) {
  changing = change;
  say(byId("role-title"), `Make it a ${change.wanted} node?`);
  say(byId("role-what"), text);
  say(byId("role-yes"), change.force ? `Make it ${change.wanted} anyway` : `Make it ${change.wanted}`);
  byId("role-dialog").showModal();
}

function startRoles() {
  const dialog = byId("role-dialog");
  dialog.addEventListener("close", () => {
    const [change, yes] = [changing, dialog.returnValue === "change"];
    changing = null;
    dialog.returnValue = "";
    if (yes && change) giveRole(change);
  });
}

async function giveRole(change) {
  try {
    await api.role(change.node.url, change.wanted, change.force);
    look();
  } catch (why) {
    if (why.code === "last_of_role") offerRole({ ...change, force: true }, `${why.message}.`);
    else notice(`${short(change.node.url)} keeps its role: ${why.message}`);
  }
}

// Tabs and colours.

function show(view) {
  for (const each of VIEWS) {
    const chosen = each === view;
    byId(each).hidden = !chosen;
    mark(byId(`tab-${each}`), "aria-selected", String(chosen));
    byId(`tab-${each}`).tabIndex = chosen ? 0 : -1;
  }
  // No name of an element: the page is not to be scrolled to it.
  if (location.hash !== `#/${view}`) history.replaceState(null, "", `#/${view}`);
}

function startTabs() {
  const tabs = VIEWS.map((view) => byId(`tab-${view}`));
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => show(VIEWS[at]));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = (to + tabs.length) % tabs.length;
      show(VIEWS[next]);
      tabs[next].focus();
    });
  });
  const named = () => (VIEWS.includes(location.hash.slice(2)) ? location.hash.slice(2) : VIEWS[0]);
  addEventListener("hashchange", () => {
    if (api.takeKeyOfAddress()) useKey();
    show(named());
  });
  show(named());
}

function startColours() {
  const buttons = [...document.querySelectorAll("[data-theme-choice]")];
  const choose = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    for (const button of buttons) mark(button, "aria-pressed", String(button.dataset.themeChoice === choice));
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      choose(button.dataset.themeChoice);
      try { localStorage.setItem("kvrelay.theme", button.dataset.themeChoice); } catch (_) { /* storage is off */ }
    });
  }
  choose(document.documentElement.dataset.theme || "auto");
}

function startPause() {
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    mark(byId("pause"), "aria-pressed", String(paused));
    say(byId("pause"), paused ? "Go on" : "Pause");
    if (paused) health("lost", "paused");
    else look();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
}

api.takeKeyOfAddress(); // before the tabs write the address
startTabs();
startColours();
startPause();
startKeys();
startDraining();
startRoles();
startRequests();
startChat();
look();
