// Recording in the browser: with a meter, to listen to, and to do again. What is recorded is put into
// the field of the file, which also takes files that were recorded elsewhere.

import { say } from "../console.js";

const LONGEST_S = 60;

function add(parent, name, properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  parent.append(node);
  return node;
}

const seconds = (started) => Math.round((performance.now() - started) / 1000);

/** Show how loud it is; returns what ends that. */
function meter(stream, place) {
  const context = new AudioContext();
  const analyser = context.createAnalyser();
  context.createMediaStreamSource(stream).connect(analyser);
  const wave = new Float32Array(analyser.fftSize);
  let frame = 0;
  const show = () => {
    analyser.getFloatTimeDomainData(wave);
    place.value = Math.min(1, 3 * Math.hypot(...wave) / Math.sqrt(wave.length));
    frame = requestAnimationFrame(show);
  };
  show();
  return () => {
    cancelAnimationFrame(frame);
    context.close();
  };
}

function recorder(field) {
  const input = field.querySelector('input[type="file"]');
  const row = document.createElement("p");
  row.className = "row";
  input.before(row);
  const button = add(row, "button", { type: "button", className: "quiet", textContent: "Record" });
  const level = add(row, "meter", { max: 1, high: 0.9, hidden: true });
  level.setAttribute("aria-label", "Loudness");
  const told = add(row, "span", { className: "hint" });
  const player = document.createElement("audio");
  Object.assign(player, { controls: true, hidden: true });
  player.setAttribute("aria-label", "What was recorded");
  input.after(player);
  let recording = null;

  function listen() {
    const [file] = input.files;
    if (player.src) URL.revokeObjectURL(player.src);
    player.hidden = !file;
    if (file) player.src = URL.createObjectURL(file);
  }

  async function start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      told.textContent =
        error.name === "NotAllowedError"
          ? "The browser does not allow the microphone here. Read the text aloud elsewhere, and choose the file below."
          : "No microphone was found. Choose a file that was recorded elsewhere below.";
      say(told.textContent);
      return;
    }
    const chunks = [];
    recording = new MediaRecorder(stream);
    const endMeter = meter(stream, level);
    const started = performance.now();
    const timer = setInterval(() => {
      told.textContent = `${seconds(started)} s`;
      if (seconds(started) >= LONGEST_S) recording?.stop();
    }, 250);
    recording.addEventListener("dataavailable", ({ data }) => chunks.push(data));
    recording.addEventListener("stop", () => {
      clearInterval(timer);
      endMeter();
      for (const track of stream.getTracks()) track.stop();
      const type = recording.mimeType.split(";")[0];
      const list = new DataTransfer();
      list.items.add(new File(chunks, `${input.name}.${type.split("/")[1]}`, { type }));
      input.files = list.files;
      input.dispatchEvent(new Event("input", { bubbles: true }));
      input.dispatchEvent(new Event("change", { bubbles: true }));
      told.textContent = `${seconds(started)} s recorded`;
      level.hidden = true;
      button.textContent = "Record again";
      recording = null;
    });
    recording.start();
    level.hidden = false;
    button.textContent = "Stop recording";
  }

  button.addEventListener("click", () => (recording ? recording.stop() : start()));
  input.addEventListener("change", listen);
}

for (const field of document.querySelectorAll("[data-record]")) recorder(field);

// Without the tick, a voice is neither stored nor imitated; the server refuses it as well.
const tick = document.querySelector('input[name="consent"]');
const button = document.querySelector("[data-consented]") ?? document.getElementById("order");
if (tick && button) {
  const sample = document.querySelector('input[name="recording"]');
  const check = () => (button.disabled = !tick.checked && (tick.required || sample.files.length > 0));
  tick.addEventListener("change", check);
  sample.addEventListener("change", check);
  check();
}
