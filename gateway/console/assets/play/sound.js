// Sound that plays while it is made, how it looks, the notes of music, and a sample of each voice.

import { add, events, form, made, order, refuse, send } from "../playground.js";

const NOTE_ON = 0x90;
const LARGEST = 30_000_000;

// --- Playing while it is made -------------------------------------------------------------------

made.addEventListener("order:accepted", ({ target, detail }) => {
  const live = add(target, "audio", { src: `/console/playground/sound/${detail.id}`, controls: true, autoplay: true });
  live.setAttribute("aria-label", "Plays while it is made");
  live.dataset.live = "";
  // What is stored takes its place once it has played, or if it cannot.
  for (const name of ["ended", "error"]) live.addEventListener(name, () => live.remove());
});

// --- Waveforms ----------------------------------------------------------------------------------

function canvas(parent, label) {
  const node = add(parent, "canvas", { width: 960, height: 120, className: "drawn" });
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  return node;
}

function colours(node) {
  const style = getComputedStyle(node);
  return { ink: style.color, line: style.borderTopColor };
}

async function wave(parent, path) {
  const data = await (await fetch(path)).arrayBuffer();
  if (data.byteLength > LARGEST) return;
  const sound = await new OfflineAudioContext(1, 1, 44100).decodeAudioData(data);
  const samples = sound.getChannelData(0);
  const node = canvas(parent, `Waveform, ${sound.duration.toFixed(1)} s`);
  const pen = node.getContext("2d");
  pen.fillStyle = colours(node).ink;
  const step = samples.length / node.width;
  for (let x = 0; x < node.width; x += 1) {
    let least = 0;
    let most = 0;
    for (let at = Math.floor(x * step); at < (x + 1) * step; at += 1) {
      least = Math.min(least, samples[at]);
      most = Math.max(most, samples[at]);
    }
    const middle = node.height / 2;
    pen.fillRect(x, middle - most * middle, 1, Math.max(1, (most - least) * middle));
  }
}

// --- Notes --------------------------------------------------------------------------------------

/** Yield the notes of a MIDI file: when they begin and end, in ticks, how high, and their track. */
function* notes(view) {
  let at = 8 + view.getUint32(4);
  for (let track = 0; at < view.byteLength; track += 1) {
    const end = at + 8 + view.getUint32(at + 4);
    const open = new Map();
    let time = 0;
    let status = 0;
    at += 8;
    const number = () => {
      let value = 0;
      for (;;) {
        const byte = view.getUint8(at++);
        value = value * 128 + (byte & 127);
        if (byte < 128) return value;
      }
    };
    const skip = () => {
      const length = number();
      at += length;
    };
    while (at < end) {
      time += number();
      if (view.getUint8(at) >= 128) status = view.getUint8(at++);
      if (status === 0xff) {
        at += 1;
        skip();
      } else if (status >= 0xf0) {
        skip();
      } else {
        const high = view.getUint8(at);
        const kind = status & 0xf0;
        const loud = kind === 0xc0 || kind === 0xd0 ? 0 : view.getUint8(at + 1);
        at += kind === 0xc0 || kind === 0xd0 ? 1 : 2;
        const key = `${status & 15} ${high}`;
        if (kind === NOTE_ON && loud) open.set(key, time);
        else if ((kind === NOTE_ON || kind === 0x80) && open.has(key)) {
          yield { begins: open.get(key), ends: time, high, track };
          open.delete(key);
        }
      }
    }
    at = end;
  }
}

async function score(parent, path) {
  const data = await (await fetch(path)).arrayBuffer();
  const found = [...notes(new DataView(data))];
  if (!found.length) return;
  const node = canvas(parent, `${found.length} notes`);
  const pen = node.getContext("2d");
  const { ink, line } = colours(node);
  const last = Math.max(...found.map((each) => each.ends));
  const low = Math.min(...found.map((each) => each.high));
  const tall = node.height / (Math.max(...found.map((each) => each.high)) - low + 1);
  const tracks = new Set(found.map((each) => each.track)).size;
  pen.fillStyle = line;
  for (let octave = Math.ceil(low / 12) * 12; octave * tall < node.height + low * tall; octave += 12) {
    pen.fillRect(0, node.height - (octave - low) * tall, node.width, 1);
  }
  pen.fillStyle = ink;
  for (const { begins, ends, high, track } of found) {
    pen.globalAlpha = 1 - (0.6 * track) / Math.max(1, tracks);
    const from = (begins / last) * node.width;
    pen.fillRect(from, node.height - (high - low + 1) * tall, Math.max(1, ((ends - begins) / last) * node.width - 1), Math.max(1, tall - 0.5));
  }
}

made.addEventListener("order:ended", ({ target, detail }) => {
  const draw = { audio: wave, score };
  target.querySelectorAll("figure[data-kind]").forEach((figure) => {
    const one = detail.media[figure.dataset.at];
    // The file plays also if it cannot be drawn.
    draw[one.kind]?.(figure, one.path).catch(() => {});
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
    button.disabled = true;
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
    button.disabled = false;
  });
  voice.addEventListener("change", price);
  price();
}

const place = document.querySelector("[data-sample]");
if (place && voice && text && order) samples(place);
