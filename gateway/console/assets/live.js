// Keeps parts of a page up to date while it is visible. A part has an id, and names its topic in
// data-live; the server decides what may be followed.
//
// One stream serves all tabs of a browser: a visible tab holds a lock, reads the stream and passes
// it on. Where that does not work, each page reads its parts again every few seconds.

import { say } from "./console.js";

const NAME = "tollgate-live";
const POLL_MS = 5000;
const REREAD_MS = 2000;
const ASK_MS = 30000;
const WAIT_MAX_MS = 15000;

const me = Math.random().toString(36).slice(2);
const channel = new BroadcastChannel(NAME);
const mark = () => document.getElementById("live");
const others = new Map();
const versions = new Map();

let paused = false;
let over = false;
let stale = null;
let state = "waiting";
let retryMs = 3000;

const parts = () => [...document.querySelectorAll("[data-live]")];
const visible = () => document.visibilityState === "visible";
const wants = () => (visible() && !paused && !over ? [...new Set(parts().map((part) => part.dataset.live))] : []);

// --- What is shown ------------------------------------------------------------------------------

const TEXTS = {
  waiting: () => ["○", "connecting"],
  live: (shown) => (stale ? ["○", `figures of ${stale}`] : ["●", `live ${shown.dataset.every} s`]),
  polling: () => ["●", `every ${POLL_MS / 1000} s`],
  broken: () => ["○", "reconnecting"],
  ended: () => ["○", "session ended: reload the page"],
};

function showState(next) {
  state = next ?? state;
  const shown = mark();
  if (!shown) return;
  const [sign, text] = paused ? ["‖", "paused"] : TEXTS[state](shown);
  shown.dataset.state = paused ? "paused" : stale && state === "live" ? "stale" : state;
  shown.querySelector("[data-sign]").textContent = sign;
  shown.querySelector("[data-words]").textContent = text;
  const button = shown.querySelector("button");
  button.textContent = paused ? "Go on" : "Pause";
  button.hidden = over;
}

function put(node, texts) {
  const { text, value, points, shown } = node.dataset;
  if (text in texts) {
    if (node.textContent !== texts[text]) {
      node.textContent = texts[text];
      if ("say" in node.dataset) say(texts[text]);
    }
    node.hidden = !texts[text];
  }
  if (shown in texts) node.hidden = !texts[shown];
  if (value in texts && texts[value]) node.value = Number(texts[value]);
  if (points in texts) node.setAttribute("points", texts[points]);
}

const busy = (part) =>
  part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, summary");

const due = new Set();
let timer = 0;
let readAt = -REREAD_MS;

/** Read parts again from the document that they are in: all at once, at most every two seconds. */
function reread(some) {
  for (const part of some) due.add(part.id);
  if (!timer && due.size) timer = setTimeout(readDue, Math.max(0, readAt + REREAD_MS - performance.now()));
}

async function readDue() {
  readAt = performance.now();
  const found = [...due].map((id) => document.getElementById(id)).filter((part) => part && !busy(part));
  due.clear();
  try {
    if (found.length && visible() && !paused) {
      await htmx.ajax("GET", location.pathname + location.search, {
        source: document.body,
        swap: "none",
        selectOOB: found.map((part) => `#${part.id}:outerMorph`).join(","),
        headers: { "Tollgate-Follows": "1" },
      });
    }
    const title = document.querySelector("h1")?.textContent;
    if (title) document.title = `${title} · Tollgate`;
  } finally {
    timer = 0;
    reread([]);
  }
}

function apply(message) {
  if (paused || !visible()) return;
  const own = parts().filter((part) => part.dataset.live === message.topic);
  if (!own.length) return;
  if ("stale" in message) {
    stale = message.stale;
    for (const part of own) part.classList.toggle("stale", Boolean(stale));
    showState();
  }
  for (const part of own) {
    if (message.texts) {
      for (const node of [part, ...part.querySelectorAll("[data-text], [data-value], [data-points], [data-shown]")]) {
        put(node, message.texts);
      }
    }
    part.dispatchEvent(new CustomEvent("live", { detail: message }));
  }
  if (message.version) {
    const known = versions.get(message.topic) ?? own[0].dataset.version;
    versions.set(message.topic, message.version);
    // The page itself is as new as a first version, unless it has been open for a while.
    if (known ? known !== message.version : performance.now() > 3000) reread(own);
  }
}

// --- The stream, in one tab ---------------------------------------------------------------------

/** Yield the events of an answer as pairs of name and data. */
async function* events(answer) {
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      for (const line of block.split("\n")) {
        if (line.startsWith("retry: ")) retryMs = Number(line.slice(7));
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) yield [name, JSON.parse(line.slice(6))];
      }
    }
  }
}

/** Follow topics until the stream ends; return why. */
async function follow(topics, signal) {
  const query = topics.map((topic) => `topics=${encodeURIComponent(topic)}`).join("&");
  const answer = await fetch(`/console/live?${query}`, { signal, redirect: "manual", cache: "no-store" });
  if (answer.type === "opaqueredirect") return "ended";
  if (answer.status === 404 || answer.status === 429) return "polling";
  if (!answer.ok) return "broken";
  tell({ state: "live" });
  for await (const [name, data] of events(answer)) {
    if (name === "message") tell({ message: data });
    if (name === "end") return "again";
  }
  return "again";
}

/** Do something in this tab and in all others. */
function tell(news) {
  hear(news);
  channel.postMessage(news);
}

function hear({ state: next, message }) {
  if (next === "ended") over = true;
  if (next) showState(next);
  if (message) apply(message);
}

const pause = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => done(clearTimeout(timer)), { once: true });
  });

const union = () => [...new Set([...wants(), ...[...others.values()].flat()])].sort();

let current = null;
let followed = "";

/** Lead until this tab is hidden: keep the stream open, with what all visible tabs follow. */
async function lead(signal) {
  const asking = setInterval(ask, ASK_MS);
  ask();
  await pause(100, signal);
  for (let failures = 0; !signal.aborted && !over; ) {
    const topics = union();
    followed = topics.join(" ");
    current = new AbortController();
    const stop = () => current.abort();
    signal.addEventListener("abort", stop, { once: true });
    const end = topics.length
      ? await follow(topics, current.signal).catch(() => "broken")
      : await pause(ASK_MS, current.signal);
    signal.removeEventListener("abort", stop);
    if (current.signal.aborted) continue;
    if (end === "again" || !end) {
      failures = 0;
      if (end) await pause(500, current.signal);
      continue;
    }
    tell({ state: end });
    failures += 1;
    const wait = end === "polling" ? 60000 : Math.min(retryMs * failures, WAIT_MAX_MS);
    await pause(wait * (0.8 + 0.4 * Math.random()), current.signal);
  }
  clearInterval(asking);
  current = null;
}

function ask() {
  others.clear();
  channel.postMessage({ ask: true });
}

channel.addEventListener("message", ({ data }) => {
  if (data.ask) channel.postMessage({ from: me, wants: wants() });
  if (data.from) {
    if (current && data.wants.length) channel.postMessage({ state });
    if (data.wants.length) others.set(data.from, data.wants);
    else others.delete(data.from);
    // What nobody follows any more costs little until the next question.
    if (current && data.wants.some((topic) => !followed.split(" ").includes(topic))) current.abort();
  }
  hear(data);
});

// --- This tab: visible, hidden, paused ----------------------------------------------------------

let turn = null;
let own = "";

function update() {
  own = wants().join(" ");
  channel.postMessage({ from: me, wants: wants() });
  if (!own) {
    turn?.abort();
    turn = null;
  } else if (navigator.locks && !turn) {
    turn = new AbortController();
    const { signal } = turn;
    navigator.locks.request(NAME, { signal }, () => lead(signal)).catch(() => {});
  } else if (current && union().join(" ") !== followed) {
    current.abort();
  }
  showState();
}

if (!navigator.locks) showState("polling");
setInterval(() => {
  if (state === "polling" && wants().length) reread(parts());
}, POLL_MS);
mark()?.querySelector("button").addEventListener("click", () => {
  paused = !paused;
  if (!paused) reread(parts().filter((part) => !part.hasAttribute("data-rows")));
  update();
});
document.addEventListener("visibilitychange", () => {
  if (visible()) reread(parts().filter((part) => !part.hasAttribute("data-rows")));
  update();
});
document.addEventListener("htmx:after:swap", () => {
  if (wants().join(" ") !== own) update();
});
window.addEventListener("pagehide", () => {
  channel.postMessage({ from: me, wants: [] });
  turn?.abort();
  turn = null;
});
window.addEventListener("pageshow", ({ persisted }) => persisted && update());
update();
