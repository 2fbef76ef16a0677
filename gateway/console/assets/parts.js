// Parts that are read later: what failed, since when, and another try. A part keeps what it shows,
// greyed, and is read again by itself, ever more seldom. What had the focus keeps it after a swap.

import { say } from "./console.js";

const FIRST_MS = 1000;
const MOST_MS = 30000;

/** Parts that fail now, with since when, how often, and the timer of the next try. */
const failing = new WeakMap();
/** What had the focus in a part when its answer came. */
const focused = new WeakMap();

const isPart = (ctx) => ctx?.target instanceof Element && ctx.target !== document.body && ctx.swap !== "none";

document.addEventListener("htmx:before:request", (event) => {
  const { ctx } = event.detail;
  if (!isPart(ctx)) return;
  const known = failing.get(ctx.target);
  if (!known) return;
  // While a part fails, its next try is timed here and not by its own interval.
  if (ctx.sourceEvent?.type === "every") event.preventDefault();
  else clearTimeout(known.timer);
});

document.addEventListener("htmx:before:response", ({ detail: { ctx } }) => {
  if (!isPart(ctx)) return;
  const active = document.activeElement;
  if (ctx.target.contains(active)) focused.set(ctx, { id: active.id, tag: active.tagName, text: active.textContent });
  // An answer that is not of the console, such as that of a proxy, has no part to show.
  if (ctx.response.status >= 400 && !ctx.hx.reselect) ctx.hx.reswap = "none";
});

document.addEventListener("htmx:finally:request", ({ detail: { ctx } }) => {
  const { status } = ctx.response ?? {};
  const broke = String(ctx.status).startsWith("error");
  if (!(ctx.target instanceof Element) || ctx.target === document.body) return;
  if (broke || status >= 400) fail(ctx, broke ? 0 : status);
  else if (status) settle(ctx.target);
  if (focused.has(ctx)) restore(ctx);
});

function settle(target) {
  clearTimeout(failing.get(target)?.timer);
  failing.delete(target);
  target.classList.remove("failing");
}

function fail(ctx, status) {
  const { target, sourceElement: source } = ctx;
  if (!target.isConnected) return;
  const known = failing.get(target) ?? { since: new Date(), failures: 0, timer: 0 };
  known.failures += 1;
  failing.set(target, known);
  const notes = [...target.querySelectorAll(":scope > .part-failed")];
  // htmx has put the console's own note first; any other answer has none.
  const note = status && ctx.hx.reselect ? notes.shift() : null;
  for (const each of notes) each.remove();
  const shown = note ?? written(target, status);
  const since = shown.querySelector("[data-since]");
  since.dateTime = known.since.toISOString();
  since.textContent = ` Since ${local(known.since)}.`;
  shown.querySelector("[data-again]").addEventListener("click", () => again(source));
  target.classList.add("failing");
  if (known.failures === 1) say(shown.querySelector("[data-message]").textContent);
  // What is wrong with the question itself stays wrong.
  if (status && status < 500 && status !== 429) return;
  const asked = Number(ctx.response?.headers.get("Retry-After") ?? 0) * 1000;
  const wait = Math.max(asked, Math.min(MOST_MS, FIRST_MS * 2 ** known.failures));
  known.timer = setTimeout(() => whenVisible(() => again(source)), wait * (0.9 + 0.2 * Math.random()));
}

/** Write the note of an answer that did not come, as the console writes it of one that did. */
function written(target, status) {
  const note = document.createElement("div");
  note.className = "band warn part-failed";
  const message = document.createElement("span");
  message.dataset.message = "";
  message.textContent = status
    ? `This part was answered with status ${status}.`
    : "Tollgate did not answer this part.";
  const since = document.createElement("time");
  since.dataset.since = "";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.dataset.again = "";
  button.textContent = "Try again";
  const words = document.createElement("p");
  words.append(message, since);
  note.append(words, button);
  target.prepend(note);
  return note;
}

const again = (source) => source.isConnected && source.dispatchEvent(new CustomEvent("again"));

function whenVisible(act) {
  if (document.visibilityState === "visible") act();
  else document.addEventListener("visibilitychange", () => whenVisible(act), { once: true });
}

/** Format a moment in the zone of the page. */
function local(moment) {
  const timeZone = document.documentElement.dataset.zone;
  return `${moment.toLocaleTimeString("en-GB", { timeZone })} ${timeZone}`;
}

/** Give the focus back to what had it, or to the part in its place. */
function restore(ctx) {
  if (document.activeElement && document.activeElement !== document.body) return;
  const { id, tag, text } = focused.get(ctx);
  const part = ctx.target.isConnected ? ctx.target : document.getElementById(ctx.target.id);
  if (!part) return;
  const same = [...part.querySelectorAll(tag)].find((each) => each.textContent === text);
  const found = (id && document.getElementById(id)) || same || part;
  if (found === part) part.tabIndex = -1;
  found.focus({ preventScroll: true });
}
