// The tail of a list: new requests enter at the top, and rows change as their requests end.
// It stops when the reader scrolls, or when more come than can be read.

import { say } from "./console.js";

const ROWS_MAX = 200;
const FEWEST = 10;
const SCROLL = 160;

const body = document.getElementById("rows");
const note = document.getElementById("tail-note");
const { since } = body.dataset;
// On a first page, only the few newest ones.
const most = note ? ROWS_MAX : Math.max(FEWEST, Number(body.dataset.rows));
const held = new Set();

let entered = 0;
let total = 0;
let paused = "";
let stopped = false;
let saidAt = 0;

const grouped = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, number < 10000 ? "" : "\u202f");

function explain() {
  if (!note) return;
  const more = Math.max(total - entered, held.size);
  note.hidden = !paused && !stopped;
  if (note.hidden) return;
  const count = more ? `+ ${grouped(more)} more` : "";
  note.querySelector("[data-words]").textContent = paused
    ? `${[count, `paused at ${paused}`].filter(Boolean).join(", ")}.`
    : `Scrolling has stopped the tail${count ? `, ${count}` : ""}.`;
}

function swap(target, text, how) {
  htmx.swap({ sourceElement: body, target, text, swap: how });
}

function enter(rows) {
  const fresh = [];
  for (const [id, html] of rows) {
    const known = document.getElementById(id);
    if (known) swap(known, html, "outerMorph");
    else if (id > since && stopped) held.add(id);
    else if (id > since) fresh.unshift(html);
  }
  if (!fresh.length) return;
  entered += fresh.length;
  swap(body, fresh.join(""), "afterbegin");
  while (body.rows.length > most) body.rows[body.rows.length - 1].remove();
  if (note && performance.now() - saidAt > 2000) {
    say(`${entered} new requests`);
    saidAt = performance.now();
  }
}

body.addEventListener("live", ({ detail }) => {
  paused = detail.paused ?? paused;
  total = detail.total ?? total;
  for (const id of detail.gone ?? []) document.getElementById(id)?.remove();
  if (detail.rows) enter(detail.rows);
  explain();
});

document.addEventListener(
  "scroll",
  () => {
    if (stopped || !note || window.scrollY < SCROLL) return;
    stopped = true;
    explain();
  },
  { passive: true },
);
