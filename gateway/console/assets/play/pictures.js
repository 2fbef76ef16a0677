// What can be done with a picture or a video that was made: look at it closely, compare it with its
// source, use its seed again, and go on from it.

import { add, form, made } from "../playground.js";

const dialog = document.createElement("dialog");
dialog.className = "zoom";
dialog.setAttribute("aria-label", "Closer look");
document.body.append(dialog);

function openDialog(build) {
  dialog.replaceChildren();
  build(dialog);
  const close = add(dialog, "button", { type: "button", className: "quiet", textContent: "Close" });
  close.addEventListener("click", () => dialog.close());
  dialog.showModal();
}

function zoom(picture) {
  openDialog((place) => {
    const frame = add(place, "div", { className: "frame", tabIndex: 0 });
    frame.setAttribute("aria-label", "Scrolls");
    const shown = add(frame, "img", { src: picture.src, alt: picture.alt });
    const label = add(place, "label", { className: "row", textContent: "Size, % " });
    const least = Math.min(100, Math.round(25600 / picture.naturalWidth));
    const range = add(label, "input", { type: "range", min: least, max: 1600, step: 1 });
    const apply = () => (shown.style.width = `${(picture.naturalWidth * range.value) / 100}px`);
    range.value = Math.max(100, Math.round(51200 / picture.naturalWidth));
    range.addEventListener("input", apply);
    apply();
  });
}

/** Compare a picture with its source, by a slider. */
function compare(picture, before) {
  openDialog((place) => {
    const pair = add(place, "div", { className: "pair" });
    add(pair, "img", { src: before, alt: "Before" });
    const after = add(pair, "img", { src: picture.src, alt: "After" });
    const label = add(place, "label", { className: "row", textContent: "Before, after " });
    const range = add(label, "input", { type: "range", min: 0, max: 100, value: 50 });
    const apply = () => (after.style.clipPath = `inset(0 0 0 ${range.value}%)`);
    range.addEventListener("input", apply);
    apply();
  });
}

/** Return the address of the source that was sent; a file is kept for the page's life. */
function sourceOf() {
  const input = form.elements.image ?? form.elements.images;
  const file = input?.files?.[0];
  if (file?.type.startsWith("image/")) return URL.createObjectURL(file);
  return form.querySelector("[data-origin]:not([hidden]) img")?.src ?? null;
}

let before = null;

function button(row, label, act) {
  add(row, "button", { type: "button", className: "quiet small", textContent: label }).addEventListener("click", act);
}

made.addEventListener("order:accepted", () => (before = sourceOf()));
made.addEventListener("order:ended", ({ target, detail }) => {
  const source = before;
  target.querySelectorAll("figure[data-kind]").forEach((figure) => {
    const one = detail.media[figure.dataset.at];
    const picture = figure.querySelector("a > img");
    const row = figure.querySelector(".acts");
    if (picture) {
      picture.parentElement.addEventListener("click", (event) => {
        event.preventDefault();
        zoom(picture);
      });
      if (source) button(row, "Before and after", () => compare(picture, source));
    }
    if (one.seed === null) return;
    const copy = add(row, "button", { type: "button", className: "quiet small", textContent: "Copy seed" });
    copy.dataset.copy = one.seed;
    const { seed, prompt } = form.elements;
    if (!seed) return;
    // A remix is the same video with other words.
    const [label, next] = one.kind === "video" && prompt ? ["Remix", prompt] : ["Use this seed", seed];
    button(row, label, () => {
      seed.value = one.seed;
      seed.closest("details")?.setAttribute("open", "");
      seed.dispatchEvent(new Event("input", { bubbles: true }));
      next.focus();
    });
  });
});
