// Abilities of every page: keyboard, menus, copying, dialogs, the browser's time zones.
// Everything here has another way without scripts; nothing is computed, least of all money.

document.documentElement.classList.add("scripts");

const said = document.getElementById("said");

/** Tell a screen reader what happened. */
export function say(text) {
  if (said) said.textContent = text;
}

async function copy(button) {
  await navigator.clipboard.writeText(button.dataset.copy);
  button.classList.add("done");
  say("Copied");
  setTimeout(() => button.classList.remove("done"), 1200);
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-copy], [data-open]");
  if (target?.dataset.copy) copy(target);
  if (target?.dataset.open) document.getElementById(target.dataset.open)?.showModal();
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

// Copying a cell of money gives the plain decimal, without the space that aligns it.
document.addEventListener("copy", (event) => {
  const text = String(document.getSelection());
  const plain = text.replaceAll("\u2212", "-").replaceAll("\u2009", "");
  if (plain === text || !event.clipboardData) return;
  event.clipboardData.setData("text/plain", plain);
  event.preventDefault();
});

const rows = () => [...document.querySelectorAll("main .rows a.open")];

function step(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by));
  all[next].focus();
}

function press(key) {
  const target = document.querySelector(`[data-shortcut="${CSS.escape(key)}"]`);
  if (!target) return false;
  target.click();
  if (target.tagName === "SUMMARY") target.parentElement.querySelector("input:not([type=hidden])")?.focus();
  return true;
}

let going = 0;

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    const menu = document.querySelector("details.menu[open]");
    if (menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) return;
  if (going && Date.now() - going < 1500) {
    going = 0;
    const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    if (link) link.click();
    return;
  }
  const act = {
    g: () => (going = Date.now()),
    j: () => step(1),
    k: () => step(-1),
    "/": () => document.querySelector(".filters :is(input, select):not([type=hidden])")?.focus(),
  }[event.key];
  if (act) act();
  else if (!press(event.key)) return;
  event.preventDefault();
});

// Offer all zones, the browser's first.
const zones = document.querySelector("[data-zones] datalist");
if (zones && Intl.supportedValuesOf) {
  zones.closest("details").addEventListener("toggle", () => {
    if (zones.children.length > 1) return;
    const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
    for (const name of [own, ...Intl.supportedValuesOf("timeZone")]) {
      const option = document.createElement("option");
      option.value = name;
      zones.append(option);
    }
  });
}

// Filters act when they change; without scripts their button does the same.
for (const form of document.querySelectorAll("form.filters")) {
  form.addEventListener("change", () => form.requestSubmit());
}

// A table that scrolls sideways is reached by keyboard.
for (const table of document.querySelectorAll(".table")) {
  if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
}

// A form is sent once, however often its button is pressed.
document.addEventListener("submit", (event) => {
  if (event.defaultPrevented || event.target.method !== "post") return;
  setTimeout(() => {
    for (const button of event.target.querySelectorAll("button:enabled")) {
      button.disabled = true;
      button.dataset.sent = "";
    }
  });
});
window.addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("button[data-sent]")) button.disabled = false;
});
