// The playground's form: its price, its call as code, and how it is sent. The form works without it.
// Prices and costs are texts of the server; what models make is put into text nodes.

import { say } from "./console.js";

const SVG = "http://www.w3.org/2000/svg";
export const form = document.getElementById("play");
export const made = document.getElementById("made");
const refusal = document.getElementById("refusal");
const stop = document.getElementById("stop");
export const order = document.getElementById("order");

export function add(parent, name, properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  parent.append(node);
  return node;
}

/** What is sent besides the fields of the form. */
export const besides = { values: () => ({}) };

/** Send the form, with other values in place of its own; raise why it is refused. */
export async function send(path, accept, { values = {}, signal } = {}) {
  const body = new FormData(form);
  for (const [name, value] of Object.entries({ ...besides.values(), ...values })) {
    body.delete(name);
    for (const each of [value].flat()) body.append(name, each);
  }
  const answer = await fetch(path, { method: "POST", body, headers: { Accept: accept }, signal });
  if (answer.redirected || answer.headers.get("HX-Redirect")) location.reload();
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const refused = new Error(found?.error?.message ?? "The server does not answer as it should; try again.");
  refused.wait = Number(answer.headers.get("Retry-After")) || 0;
  refused.status = answer.status;
  throw refused;
}

/** Yield the server-sent events of an answer as pairs of name and data. */
export async function* events(answer) {
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/s.exec(part) ?? [];
      if (name) yield [name, JSON.parse(data)];
    }
  }
}

// --- The price, again after each change ---------------------------------------------------------

let timer = 0;
let asked = 0;

/** Models that are ordered beside the form's own. */
export const beside = [...document.querySelectorAll("[data-beside]")];
const others = () => beside.map((each) => each.value).filter(Boolean);

export function showWords(unknown) {
  const place = document.getElementById("unknown");
  place.hidden = !unknown.length;
  place.textContent = unknown.length ? `${form.elements.model.value} does not know: ${unknown.join(", ")}.` : "";
}

function priceOf(found, model = "") {
  const line = document.createElement("span");
  line.append(`${model ? `${model} costs` : "Costs"}${found.is_exact ? "" : " at most"} `);
  add(line, "b", { textContent: found.most });
  return line;
}

export async function quote() {
  const price = document.getElementById("price");
  const number = ++asked;
  clearTimeout(timer);
  timer = 0;
  price.ariaBusy = "true";
  try {
    if (!form.checkValidity()) {
      price.textContent = "";
      return;
    }
    const models = others();
    const answers = await Promise.all(
      ["", ...models].map((model) => send(form.dataset.quote, "application/json", { values: model ? { model } : {} })),
    );
    const [found, ...more] = await Promise.all(answers.map((each) => each.json()));
    if (number !== asked) return;
    price.replaceChildren(priceOf(found, models.length ? form.elements.model.value : ""));
    more.forEach((each, place) => price.append(", ", priceOf(each, models[place])));
    showWords(found.unknown);
    document.getElementById("available").textContent = found.available;
    for (const place of document.querySelectorAll("[data-code]")) {
      place.textContent = found.code[place.dataset.code];
    }
  } catch (error) {
    if (number === asked) price.textContent = error.message;
  } finally {
    if (number === asked && !timer) price.ariaBusy = "false";
  }
}

export function changed() {
  document.getElementById("price").ariaBusy = "true";
  clearTimeout(timer);
  timer = setTimeout(quote, 300);
}

/** The address of the form with its settings: what is content stays here. */
function share() {
  const settings = new URLSearchParams({ model: form.elements.model.value, task: form.elements.task.value });
  for (const each of form.querySelectorAll("input[type=text], select")) {
    if (each.name && each.value && !("content" in each.dataset)) settings.set(each.name, each.value);
  }
  return `${location.origin}/console/playground?${settings}`;
}

document.getElementById("share").addEventListener("click", async (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  await navigator.clipboard.writeText((event.target.href = share()));
  event.target.textContent = "Copied its address";
  say("Copied the address of these settings");
});

form.addEventListener("input", changed);
for (const each of beside) each.addEventListener("change", changed);
quote();

// --- Sending ------------------------------------------------------------------------------------

/** Show why an order was refused; after the pause that the server asks for, say so. */
export function refuse(error) {
  let left = error.wait ?? 0;
  refusal.hidden = false;
  refusal.textContent = error.message;
  const count = left ? add(refusal, "span") : null;
  const tick = () => {
    if (!count?.isConnected) return;
    count.textContent = left > 0 ? ` Try again in ${left} s.` : " Try again now.";
    if (left-- > 0) setTimeout(tick, 1000);
  };
  tick();
  if (error.status === 402) {
    refusal.append(" ");
    add(refusal, "a", { href: form.dataset.short, textContent: form.dataset.shortText });
  }
}

/** Switch a button off or on; it keeps the focus, which a disabled one would lose. */
export function switchOff(button, off = true) {
  button.setAttribute("aria-disabled", String(off));
}

export const isOff = (button) => button.disabled || button.ariaDisabled === "true";

/** Run orders with the form switched off; `leaving` ends them. */
export async function busy(run, { stoppable = true } = {}) {
  const leaving = new AbortController();
  refusal.hidden = true;
  switchOff(order);
  stop.hidden = !stoppable;
  stop.onclick = () => leaving.abort();
  document.getElementById("nothing").hidden = true;
  try {
    await run(leaving.signal);
  } catch (error) {
    refuse(error);
  }
  switchOff(order, false);
  if (document.activeElement === stop) order.focus();
  stop.hidden = true;
}

/** Say what an order cost and how fast it was. */
export function showCost(state, ended, path) {
  state.replaceChildren(ended.status === "succeeded" ? "" : `${ended.message || ended.status} `, "Charged ");
  add(state, "b", { className: "charged", textContent: ended.cost });
  state.append(` in ${ended.took}${ended.speed ? `, ${ended.speed}` : ""} · `);
  add(state, "a", { href: path, textContent: "receipt" });
  if (ended.phases.length) showTime(state, ended);
  say(`Charged ${ended.cost}`);
  // The list of what was ordered is read again.
  document.body.dispatchEvent(new CustomEvent("ordered"));
  changed();
}

export function showBreak(state, path, signal) {
  state.textContent = signal.aborted ? "Stopped; what had come is charged. " : "The connection broke. ";
  if (path) add(state, "a", { href: path, textContent: "receipt" });
}

/** Show the phases of an order to scale, and what became of its hold. */
function showTime(state, { held, cost, released, phases }) {
  const box = add(state, "details", { className: "tokens" });
  add(box, "summary", { textContent: "Time and hold" });
  add(box, "p", { textContent: `Held ${held}, charged ${cost}, released ${released}.` });
  const body = add(add(box, "table", { className: "waterfall" }), "tbody");
  for (const { name, took, start, wide } of phases) {
    const row = add(body, "tr");
    add(row, "th", { scope: "row", textContent: name });
    const bar = add(row, "td").appendChild(document.createElementNS(SVG, "svg"));
    for (const [key, value] of [["width", "100%"], ["height", 12], ["aria-hidden", "true"]]) bar.setAttribute(key, value);
    const rect = bar.appendChild(document.createElementNS(SVG, "rect"));
    rect.setAttribute("class", name);
    for (const [key, value] of [["x", `${start}%`], ["width", `${wide}%`], ["height", 12]]) rect.setAttribute(key, value);
    add(row, "td", { className: "number", textContent: took });
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !stop.hidden && !document.querySelector("dialog[open]")) stop.click();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
