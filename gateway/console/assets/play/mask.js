// Draws the mask of an edit over its source: by mouse, finger, pen or keyboard. It is sent as a PNG of
// the source's size, transparent where the picture is to be changed.

import { add, form } from "../playground.js";
import { put } from "./sources.js";

const source = form.elements.image ?? form.elements.images;
const target = form.elements.mask;
const field = target.closest(".field");
const box = add(field, "div", { className: "mask", hidden: true });
const stage = add(box, "div", { className: "stage" });
const below = add(stage, "canvas");
const canvas = add(stage, "canvas", { tabIndex: 0 });
const ring = add(stage, "span", { className: "ring", hidden: true });
const pen = canvas.getContext("2d", { willReadFrequently: true });
canvas.setAttribute("role", "application");
canvas.setAttribute("aria-label", "Mask: the arrows move, the space bar paints");
add(box, "p", { className: "hint", textContent: "Paint what is to be changed. By keyboard: arrows move, with Shift by one pixel, the space bar paints." });
const tools = add(box, "p", { className: "row" });

let strokes = [];
let stroke = null;
const cursor = { x: 0, y: 0 };

function button(label, act) {
  const node = add(tools, "button", { type: "button", className: "quiet small", textContent: label });
  node.addEventListener("click", act);
  return node;
}

const eraser = button("Eraser", () => eraser.setAttribute("aria-pressed", String(!erases())));
eraser.setAttribute("aria-pressed", "false");
const erases = () => eraser.getAttribute("aria-pressed") === "true";
const label = add(tools, "label", { className: "row", textContent: "Brush, px " });
const brush = add(label, "input", { type: "range", min: 4, max: 128, value: 24 });
const size = add(label, "output", { textContent: brush.value });
brush.addEventListener("input", () => {
  size.textContent = brush.value;
  showRing();
});
button("Undo", () => {
  strokes.pop();
  redraw();
});
button("Invert", () => keep({ kind: "invert" }));
button("Clear", () => keep({ kind: "clear" }));

function invert() {
  pen.globalCompositeOperation = "xor";
  pen.fillRect(0, 0, canvas.width, canvas.height);
}

function drawStroke({ kind, width, points }) {
  pen.save();
  pen.fillStyle = pen.strokeStyle = "#e00000";
  if (kind === "clear") pen.clearRect(0, 0, canvas.width, canvas.height);
  else if (kind === "invert") invert();
  else {
    pen.globalCompositeOperation = kind === "erase" ? "destination-out" : "source-over";
    Object.assign(pen, { lineWidth: width, lineCap: "round", lineJoin: "round" });
    pen.beginPath();
    pen.moveTo(points[0].x, points[0].y);
    // A line without length would not be drawn, and a dot is one.
    for (const point of points) pen.lineTo(point.x + 0.01, point.y);
    pen.stroke();
  }
  pen.restore();
}

function redraw() {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  for (const each of strokes) drawStroke(each);
  send();
}

function keep(made) {
  strokes.push(made);
  redraw();
}

let sends = 0;

/** Put the mask into its field: every pixel is either kept or changed. The newest one counts. */
async function send() {
  const number = ++sends;
  const { width, height } = canvas;
  const painted = pen.getImageData(0, 0, width, height);
  let any = false;
  for (let at = 3; at < painted.data.length; at += 4) {
    const changes = painted.data[at] >= 128;
    any ||= changes;
    painted.data.set([0, 0, 0, changes ? 0 : 255], at - 3);
  }
  stage.ariaBusy = String(any);
  target.value = "";
  if (!any) {
    put(target, []);
    return;
  }
  const made = Object.assign(document.createElement("canvas"), { width, height });
  made.getContext("2d").putImageData(painted, 0, 0);
  const blob = await new Promise((resolve) => made.toBlob(resolve, "image/png"));
  if (number !== sends) return;
  put(target, [new File([blob], "mask.png", { type: "image/png" })]);
  stage.ariaBusy = "false";
}

function place(event) {
  const shown = canvas.getBoundingClientRect();
  return {
    x: ((event.clientX - shown.left) * canvas.width) / shown.width,
    y: ((event.clientY - shown.top) * canvas.height) / shown.height,
  };
}

/** Show where the keyboard's brush is. */
function showRing() {
  const scale = canvas.clientWidth / canvas.width;
  const across = brush.value * scale;
  Object.assign(ring.style, {
    width: `${across}px`, height: `${across}px`,
    left: `${cursor.x * scale - across / 2}px`, top: `${cursor.y * scale - across / 2}px`,
  });
}

function begin(point) {
  stroke = { kind: erases() ? "erase" : "paint", width: Number(brush.value), points: [point] };
  drawStroke(stroke);
}

function end() {
  if (!stroke) return;
  const made = stroke;
  stroke = null;
  keep(made);
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  begin(place(event));
});
canvas.addEventListener("pointermove", (event) => {
  if (!stroke) return;
  const points = event.getCoalescedEvents?.() ?? [];
  for (const each of points.length ? points : [event]) stroke.points.push(place(each));
  drawStroke({ ...stroke, points: stroke.points.slice(-2 - points.length) });
});
canvas.addEventListener("pointerup", end);
canvas.addEventListener("pointercancel", end);

canvas.addEventListener("focus", () => {
  ring.hidden = !canvas.matches(":focus-visible");
  showRing();
});
canvas.addEventListener("blur", () => (ring.hidden = true));
canvas.addEventListener("keydown", (event) => {
  const step = event.shiftKey ? 1 : Math.max(1, Math.round(brush.value / 4));
  const move = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
  if (move) {
    cursor.x = Math.min(canvas.width, Math.max(0, cursor.x + move[0]));
    cursor.y = Math.min(canvas.height, Math.max(0, cursor.y + move[1]));
    ring.hidden = false;
    showRing();
  } else if (event.key === " ") {
    begin({ ...cursor });
    end();
  } else return;
  event.preventDefault();
});

/** Begin with another source. */
async function open() {
  const origin = form.querySelector("[data-origin]:not([hidden]) img");
  const file = source.files[0];
  const picture = new Image();
  const address = file ? URL.createObjectURL(file) : origin?.src;
  strokes = [];
  box.hidden = true;
  if (!address) return;
  picture.src = address;
  try {
    await picture.decode();
  } catch {
    return;
  }
  const [width, height] = [picture.naturalWidth, picture.naturalHeight];
  for (const each of [below, canvas]) Object.assign(each, { width, height });
  below.getContext("2d").drawImage(picture, 0, 0);
  if (file) URL.revokeObjectURL(address);
  brush.value = size.textContent = String(Math.min(128, Math.max(4, Math.round(Math.min(width, height) / 8))));
  Object.assign(cursor, { x: width / 2, y: height / 2 });
  box.hidden = false;
  redraw();
}

source.addEventListener("change", open);
open();
