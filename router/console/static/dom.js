// Elements and figures. Text only ever becomes text: nothing that a node or a model says is read as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element: h("td.num", {title: "x"}, child, ...). Children are nodes or text; null is left out. */
export function h(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  put(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  put(element, attributes);
  element.append(...children);
  return element;
}

function put(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

/** Set text, attributes and such only where they change, so that focus, selection and screen readers stay. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Children of `parent` for `items`, kept by key: `make(item)` once, `update(element, item)` always, in order. */
export function keyed(parent, items, key, make, update) {
  const known = parent.known || (parent.known = new Map());
  const wanted = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (wanted.has(name)) continue;
    wanted.add(name);
    let element = known.get(name);
    if (!element) known.set(name, (element = make(item)));
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
    update(element, item);
  }
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
}

const NONE = "–";

/** A time in seconds, with three figures. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const ms = seconds * 1e3;
  if (ms < 0.005) return "0 ms";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(2)} s`;
  return `${seconds.toFixed(0)} s`;
}

export function count(number) {
  if (number === null || number === undefined) return NONE;
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)} k`;
  return String(Math.round(number));
}

export function rate(number) {
  if (number >= 100) return count(number);
  return number.toFixed(1);
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let left = number;
  while (left >= 1000 && at < units.length - 1) {
    left /= 1000;
    at += 1;
  }
  return `${at && left < 100 ? left.toFixed(1) : left.toFixed(0)} ${units[at]}`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(0)} h`;
  return `${(seconds / 86400).toFixed(0)} days`;
}

export function clock(unix) {
  const at = new Date(unix * 1e3);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** host:port of an address; the port alone would do on one host, but not on several. */
export function short(url) {
  return url.replace(/^https?:\/\//, "").replace(/\/$/, "");
}
