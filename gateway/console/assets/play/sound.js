// Sound that plays while it is made and is drawn when it is stored, and a sample of each voice.

import { add, events, form, isOff, made, order, refuse, send, switchOff } from "../playground.js";
import { draw, drawing } from "../drawings.js";

// --- Playing while it is made -------------------------------------------------------------------

made.addEventListener("order:accepted", ({ target, detail }) => {
  const live = add(target, "audio", { src: `/console/playground/sound/${detail.id}`, controls: true, autoplay: true });
  live.setAttribute("aria-label", "Plays while it is made");
  live.dataset.live = "";
  // What is stored takes its place once it has played, or if it cannot.
  for (const name of ["ended", "error"]) live.addEventListener(name, () => live.remove());
});

// --- Drawings -----------------------------------------------------------------------------------

made.addEventListener("order:ended", ({ target, detail }) => {
  target.querySelectorAll("figure[data-kind]").forEach((figure) => {
    const { kind, path } = detail.media[figure.dataset.at];
    if (!drawing[kind]) return;
    const canvas = Object.assign(document.createElement("canvas"), { width: 960, height: 120, className: "drawn" });
    canvas.setAttribute("role", "img");
    figure.prepend(canvas);
    draw(canvas, kind, path);
  });
  if (detail.status !== "succeeded") target.querySelector("[data-live]")?.remove();
});

// --- Samples of voices --------------------------------------------------------------------------

const { voice, text } = form.elements;

if (text?.value !== undefined) {
  const count = add(text.parentElement, "p", { className: "hint" });
  const show = () => (count.textContent = text.value ? `${[...text.value].length} characters` : "");
  text.addEventListener("input", show);
  show();
}

/** Offer to hear the chosen voice say the sentence of the page, for its price. */
function samples(place) {
  const sentence = place.dataset.sample;
  const button = add(place, "button", { type: "button", className: "quiet small" });
  const values = () => ({ text: sentence, voice: voice.value });
  let asked = 0;
  const price = async () => {
    const number = ++asked;
    button.hidden = !voice.value;
    if (!voice.value) return;
    button.disabled = true;
    button.textContent = "Hear this voice";
    try {
      const found = await (await send(form.dataset.quote, "application/json", { values: values() })).json();
      if (number !== asked) return;
      button.textContent = `Hear this voice (${found.most})`;
      button.disabled = false;
    } catch {
      button.hidden = true;
    }
  };
  button.addEventListener("click", async () => {
    if (isOff(button)) return;
    switchOff(button);
    try {
      for await (const [name, data] of events(await send(form.action, "text/event-stream", { values: values() }))) {
        if (name !== "ended" || !data.media.length) continue;
        place.querySelector("audio")?.remove();
        const player = add(place, "audio", { src: data.media[0].path, controls: true });
        player.setAttribute("aria-label", `Sample of ${voice.value}, charged ${data.cost}`);
        player.play().catch(() => {});
      }
    } catch (error) {
      refuse(error);
    }
    switchOff(button, false);
  });
  voice.addEventListener("change", price);
  price();
}

const place = document.querySelector("[data-sample]");
if (place && voice && text && order) samples(place);
