// Orders of everything but chat: progress, previews, and what was made. Other modules of the
// playground listen to the events `order:accepted`, `order:progress` and `order:ended` of its place.

import {
  add, beside, busy, events, form, isOff, made, order, send, showBreak, showCost, showWords,
} from "../playground.js";
import { Growing, Ticker, showTokens } from "./text.js";

const MEDIA = {
  image: (place, one) => add(add(place, "a", { href: one.path }), "img", { src: one.path, alt: one.facts }),
  video: (place, one) => add(place, "video", { src: one.path, controls: true }),
  audio: (place, one) => add(place, "audio", { src: one.path, controls: true }),
};

function tell(place, name, detail) {
  place.dispatchEvent(new CustomEvent(`order:${name}`, { detail, bubbles: true }));
}

const ASIDE = { spritesheet: "sheet of frames", thumbnail: "first picture" };

/** Show what was made; the pictures that belong to a video are its poster and a link. */
function showMade(place, ended, path) {
  if (ended.value) add(place, "pre", { className: "output", tabIndex: 0, textContent: ended.value });
  place.querySelector(".previews")?.remove();
  const gallery = add(place, "div", { className: "media" });
  ended.media.forEach((one, at) => {
    if (ASIDE[one.role]) return;
    const figure = add(gallery, "figure");
    const shown = MEDIA[one.kind]?.(figure, one);
    shown?.setAttribute("aria-label", one.facts || one.kind);
    const caption = add(figure, "figcaption", { className: "hint", textContent: one.facts && `${one.facts} · ` });
    add(caption, "a", { href: one.path, download: "", textContent: "download" });
    Object.assign(figure.dataset, { kind: one.kind, at });
    const row = add(figure, "p", { className: "row acts" });
    for (const { label, path: href } of one.next) add(row, "a", { href, textContent: label, className: "button quiet small" });
    if (one.kind !== "video") return;
    for (const { role, path } of ended.media.filter((each) => ASIDE[each.role])) {
      if (role === "thumbnail") shown.poster = path;
      caption.append(" · ");
      add(caption, "a", { href: path, textContent: ASIDE[role] });
    }
  });
  if (ended.media.length > 1) add(place, "a", { href: `${path}/files`, download: "", textContent: "Download all files" });
}

function showPreview(place, { output, source }) {
  const gallery = place.querySelector(".previews") ?? add(place, "div", { className: "media previews" });
  let picture = gallery.querySelector(`[data-output="${output}"]`);
  if (!picture) {
    picture = add(gallery, "img", { alt: `Preview ${output + 1}, not finished` });
    picture.dataset.output = output;
  }
  picture.src = source;
}

function showProgress(state, { step, steps, left, stage }) {
  const done = stage?.steps ? `step ${stage.step} of ${stage.steps}` : steps ? `step ${step} of ${steps}` : "";
  const name = stage ? `${stage.name}${stage.status === "running" ? "" : ` ${stage.status}`}` : "";
  state.textContent = [name, done, left && `about ${left} left`].filter(Boolean).join(", ") || "Waiting …";
}

/** Whether a text is continued: it is shown after its beginning, and leaving ends it. */
const continues = "continues" in form.dataset;

/** Texts as they come, several if the form asks for several. */
class Texts {
  constructor(place) {
    this.place = add(place, "div", { className: "texts" });
    this.begins = continues ? form.elements.prompt.value : "";
    this.all = [];
  }

  push({ text, index }) {
    this.all[index] ??= new Growing(this.place, this.begins);
    this.all[index].push(text);
  }

  flush() {
    for (const each of this.all) each?.flush();
  }
}

async function run(signal, model, { named = false } = {}) {
  const answer = await send(form.action, "text/event-stream", { values: { model }, signal });
  const place = document.createElement("article");
  made.querySelector("h2").after(place);
  if (named) add(place, "h3", { textContent: model });
  const texts = new Texts(place);
  const state = add(place, "div", { className: "hint", textContent: "Waiting …" });
  // On a small screen the result is below the form.
  place.scrollIntoView({ block: "nearest" });
  const ticker = new Ticker(state);
  let path = "";
  try {
    for await (const [name, data] of events(answer)) {
      if (name === "accepted") {
        path = data.path;
        ticker.most = data.most;
        state.textContent = `Held ${data.held}. Waiting …`;
      }
      if (name === "text") {
        texts.push(data);
        ticker.show(data);
      }
      if (name === "preview") showPreview(place, data);
      if (name === "progress") showProgress(state, data);
      if (name === "failed") state.textContent = data.message;
      if (name === "ended") {
        ticker.end();
        showMade(place, data, path);
        showCost(state, data, path);
        const all = continues ? data.tokens : [];
        all.forEach((each, at) => showTokens(place, each, all.length > 1 ? ` of text ${at + 1}` : ""));
        showWords(data.unknown);
      }
      tell(place, name, data);
    }
  } catch {
    ticker.end();
    showBreak(state, path, signal);
  }
  texts.flush();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!order || isOff(order)) return;
  const models = [form.elements.model.value, ...beside.map((each) => each.value).filter(Boolean)];
  const named = models.length > 1;
  busy(
    async (signal) => {
      const ended = await Promise.allSettled(models.map((model) => run(signal, model, { named })));
      const refused = ended.findIndex(({ status }) => status === "rejected");
      if (refused < 0) return;
      const { reason } = ended[refused];
      if (named) reason.message = `${models[refused]}: ${reason.message}`;
      throw reason;
    },
    { stoppable: continues },
  );
});
