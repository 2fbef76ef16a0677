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

/** Save a text of the page as a file, without asking the server for it. */
function save(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-copy], [data-open], [data-save]");
  if (target?.dataset.copy) copy(target);
  if (target?.dataset.save) save(`${target.dataset.save}\n`, target.dataset.as);
  if (target?.dataset.open) document.getElementById(target.dataset.open)?.showModal();
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
  openRow(event);
});

/** Open the row that was clicked. Its link covers it, but not beside a first column that stays. */
function openRow(event) {
  if (event.target.closest("a, button, input, label, select, details, form, audio") || String(getSelection())) return;
  const link = event.target.closest("main .rows tbody tr")?.querySelector("a.open");
  link?.dispatchEvent(new MouseEvent("click", event));
}

// Of a row of tabs that scrolls, the chosen one is in sight.
for (const tab of document.querySelectorAll(".tabs > [aria-current]")) {
  const row = tab.parentElement;
  row.scrollLeft = tab.offsetLeft - row.offsetLeft - row.clientWidth / 3;
}

// Copying a cell of money gives the plain decimal, without the space that aligns it.
document.addEventListener("copy", (event) => {
  const text = String(document.getSelection());
  const plain = text.replaceAll("\u2212", "-").replaceAll("\u202f", "");
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

/** The row that has the focus. */
const row = () => document.activeElement?.closest("main tr");

/** Copy the id of the row that has the focus, otherwise that of the page. */
function copyId() {
  const button = (row() ?? document.querySelector("main"))?.querySelector("[data-copy]");
  if (button) return copy(button);
  const id = row()?.querySelector("a.open")?.pathname.split("/").at(-1);
  return id && navigator.clipboard.writeText(decodeURIComponent(id)).then(() => say("Copied"));
}

// The palette: what is typed is looked up by htmx; arrows go through what was found.

const palette = document.getElementById("palette");
const results = () => [...palette.querySelectorAll("#palette-found a")];

function openPalette() {
  if (!palette || document.querySelector("dialog[open]")) return;
  palette.showModal();
  const field = palette.querySelector("input");
  field.select();
  if (!results().length) field.dispatchEvent(new CustomEvent("open"));
}

palette?.addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const all = results();
  if (by && all.length) {
    event.preventDefault();
    const next = all.indexOf(document.activeElement) + by;
    if (next < 0) palette.querySelector("input").focus();
    else all[Math.min(next, all.length - 1)].focus();
  }
});
palette?.querySelector("form").addEventListener("submit", (event) => {
  // What is shown can be older than what was typed: then the page of results is opened.
  const [first] = results();
  if (!first || palette.querySelector("#palette-found").dataset.for !== palette.querySelector("input").value) return;
  event.preventDefault();
  first.click();
});
document.addEventListener("htmx:after:swap", ({ detail: { ctx } }) => {
  if (ctx?.target?.id === "palette-found") ctx.target.dataset.for = ctx.sourceElement.value;
});
document.querySelector("[data-palette]")?.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  openPalette();
});

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
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey) {
    event.preventDefault();
    openPalette();
    return;
  }
  if (["Shift", "Control", "Alt", "Meta", "AltGraph"].includes(event.key)) return;
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
    x: () => row()?.querySelector("input[type=checkbox]")?.click(),
    c: copyId,
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

// Filters act when they change; without scripts their button does the same. The address of the next
// page ends with the field that has the focus then, which so keeps it.
for (const form of document.querySelectorAll("form.filters")) {
  form.addEventListener("change", () =>
    // What changed loses the focus only afterwards, if it was left by a key.
    setTimeout(() => {
      const { id } = document.activeElement;
      if (id && form.contains(document.activeElement)) form.action = `${form.action.split("#")[0]}#${id}`;
      form.requestSubmit();
    }),
  );
}
const changed = document.getElementById(location.hash.slice(1));
if (changed?.matches("form.filters :is(input, select, button)")) {
  changed.closest("details")?.setAttribute("open", "");
  changed.focus({ preventScroll: true });
  history.replaceState(null, "", location.pathname + location.search);
}

// A table that scrolls is reached by keyboard.
for (const table of document.querySelectorAll(".table")) {
  const scrolls = table.scrollWidth > table.clientWidth || table.scrollHeight > table.clientHeight;
  if (scrolls && getComputedStyle(table).overflowX !== "visible") table.tabIndex = 0;
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
