// The playground: sends its form, and shows the answer while it comes. The form works without it.
// Prices and costs are texts of the server; what models make is put into text nodes.

import { say } from "./console.js";

const form = document.getElementById("play");
const made = document.getElementById("made");
const refusal = document.getElementById("refusal");
const stop = document.getElementById("stop");
const order = document.getElementById("order");
const earlier = form.elements.messages;

function add(parent, name, properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  parent.append(node);
  return node;
}

async function send(path, accept, signal) {
  const answer = await fetch(path, { method: "POST", body: new FormData(form), headers: { Accept: accept }, signal });
  if (answer.redirected || answer.headers.get("HX-Redirect")) location.reload();
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const wait = answer.headers.get("Retry-After");
  const text = found?.error?.message ?? "The server does not answer as it should; try again.";
  throw new Error(wait ? `${text} Try again in ${wait} s.` : text);
}

/** Yield the server-sent events of an answer as pairs of name and data. */
async function* events(answer) {
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

function showWords(unknown) {
  const place = document.getElementById("unknown");
  place.hidden = !unknown.length;
  place.textContent = unknown.length ? `${form.elements.model.value} does not know: ${unknown.join(", ")}.` : "";
}

async function quote() {
  const price = document.getElementById("price");
  if (!form.checkValidity()) {
    price.textContent = "";
    return;
  }
  const number = ++asked;
  try {
    const found = await (await send(form.dataset.quote, "application/json")).json();
    if (number !== asked) return;
    price.replaceChildren(found.is_exact ? "Costs " : "Costs at most ");
    add(price, "b", { textContent: found.most });
    showWords(found.unknown);
    for (const place of document.querySelectorAll("[data-code]")) {
      place.textContent = found.code[place.dataset.code];
    }
  } catch (error) {
    if (number === asked) price.textContent = error.message;
  }
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(quote, 300);
});
quote();

// --- The order ----------------------------------------------------------------------------------

const MEDIA = {
  image: (place, one) => add(add(place, "a", { href: one.path }), "img", { src: one.path, alt: one.facts }),
  video: (place, one) => add(place, "video", { src: one.path, controls: true }),
  audio: (place, one) => add(place, "audio", { src: one.path, controls: true }),
};

function showMade(place, text, ended) {
  if (!text.data && ended.text) text.data = ended.text;
  if (ended.value) add(place, "pre", { className: "output", tabIndex: 0, textContent: ended.value });
  const gallery = add(place, "div", { className: "media" });
  for (const one of ended.media) {
    const figure = add(gallery, "figure");
    MEDIA[one.kind]?.(figure, one)?.setAttribute("aria-label", one.facts || one.kind);
    add(add(figure, "figcaption", { className: "hint", textContent: `${one.facts} ` }), "a", {
      href: one.path, download: "", textContent: "download",
    });
  }
}

function showCost(state, ended, path) {
  state.replaceChildren(ended.status === "succeeded" ? "" : `${ended.message || ended.status} `, "Charged ");
  add(state, "b", { className: "charged", textContent: ended.cost });
  state.append(` in ${ended.took} · `);
  add(state, "a", { href: path, textContent: "receipt" });
  say(`Charged ${ended.cost}`);
}

async function run(signal) {
  const answer = await send(form.action, "text/event-stream", signal);
  document.getElementById("nothing").hidden = true;
  const place = document.createElement("article");
  if (earlier) {
    add(place, "p", { className: "said", textContent: form.elements.message.value });
    made.append(place);
  } else {
    made.querySelector("h2").after(place);
  }
  const text = add(place, "p", { className: "answered" }).appendChild(document.createTextNode(""));
  const state = add(place, "p", { className: "hint", textContent: "Waiting …" });
  let path = "";
  try {
    for await (const [name, data] of events(answer)) {
      if (name === "accepted") path = data.path;
      if (name === "text") text.appendData(data.text);
      if (name === "progress") {
        state.textContent = `${data.stage ? `${data.stage}: ` : ""}step ${data.step} of ${data.steps}`;
      }
      if (name === "failed") state.textContent = data.message;
      if (name === "ended") {
        showMade(place, text, data);
        showCost(state, data, path);
        showWords(data.unknown);
        if (earlier && data.status === "succeeded") remember(text.data);
      }
    }
  } catch (error) {
    state.textContent = signal.aborted ? "Stopped; what had come is charged. " : "The connection broke. ";
    add(state, "a", { href: path, textContent: "receipt" });
  }
}

/** Keep a turn of the conversation, which the next message continues. */
function remember(answered) {
  const { message } = form.elements;
  const turns = JSON.parse(earlier.value);
  turns.push({ role: "user", content: message.value }, { role: "assistant", content: answered });
  earlier.value = JSON.stringify(turns);
  message.value = "";
  message.focus();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!order) return;
  const leaving = new AbortController();
  refusal.hidden = true;
  order.disabled = true;
  stop.hidden = !earlier;
  stop.onclick = () => leaving.abort();
  try {
    await run(leaving.signal);
  } catch (error) {
    refusal.textContent = error.message;
    refusal.hidden = false;
  }
  order.disabled = false;
  stop.hidden = true;
});

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
