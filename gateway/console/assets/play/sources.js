// Files of the form: dropped, pasted, shown before they are sent, and taken out again.

import { add, form } from "../playground.js";

const PREVIEWS = { image: "img", audio: "audio", video: "video" };
const inputs = [...form.querySelectorAll('input[type="file"]')];

const accepts = (input, file) => !input.accept || file.type.startsWith(input.accept.replace("*", ""));

/** Put files into a field, as if they had been chosen. */
export function put(input, files) {
  const list = new DataTransfer();
  for (const file of input.multiple ? [...input.files, ...files] : files.slice(0, 1)) list.items.add(file);
  input.files = list.files;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.dispatchEvent(new Event("change", { bubbles: true }));
}

export function empty(input) {
  input.value = "";
  put(input, []);
}

function show(input, shelf) {
  for (const old of shelf.querySelectorAll("[src]")) URL.revokeObjectURL(old.src);
  shelf.replaceChildren();
  // A file that was chosen takes the place of an output that was carried here.
  const origin = input.parentElement.querySelector("[data-origin]");
  if (origin) origin.hidden = input.files.length > 0;
  [...input.files].forEach((file, number) => {
    const box = add(shelf, "figure");
    const kind = PREVIEWS[file.type.split("/")[0]];
    if (kind) {
      const shown = add(box, kind, { src: URL.createObjectURL(file), controls: kind !== "img" });
      if (kind === "img") shown.alt = file.name;
      else shown.setAttribute("aria-label", file.name);
    }
    const row = add(box, "figcaption", { className: "row hint", textContent: `${file.name} ` });
    const out = add(row, "button", { type: "button", className: "quiet small", textContent: "Take out" });
    out.setAttribute("aria-label", `Take out ${file.name}`);
    out.addEventListener("click", () => {
      const rest = [...input.files].filter((_, place) => place !== number);
      empty(input);
      put(input, rest);
      input.focus();
    });
  });
}

for (const input of inputs) {
  const field = input.closest(".field");
  // A mask is shown over its picture, and a recording by its recorder.
  const shown = input.name !== "mask" && !("record" in field.dataset);
  const shelf = add(field, "div", { className: "media shelf" });
  if (shown) input.addEventListener("change", () => show(input, shelf));
  field.addEventListener("dragover", (event) => {
    event.preventDefault();
    field.classList.add("over");
  });
  field.addEventListener("dragleave", () => field.classList.remove("over"));
  field.addEventListener("drop", (event) => {
    event.preventDefault();
    field.classList.remove("over");
    const files = [...event.dataTransfer.files].filter((file) => accepts(input, file));
    if (files.length) put(input, files);
  });
  if (shown && input.files.length) show(input, shelf);
}

// A picture of ours is put in without leaving what is in the form.
for (const link of form.querySelectorAll("[data-example]")) {
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    const blob = await (await fetch(link.dataset.example)).blob();
    put(link.closest(".field").querySelector('input[type="file"]'), [new File([blob], "portrait.png", { type: blob.type })]);
  });
}

document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  const able = inputs.filter((input) => input.name !== "mask" && files.some((file) => accepts(input, file)));
  const input = able.find((each) => each.multiple || !each.files.length) ?? able[0];
  if (!input) return;
  event.preventDefault();
  put(input, files.filter((file) => accepts(input, file)));
});
