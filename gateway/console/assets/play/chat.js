// Conversations: up to three models beside each other, messages that are edited, deleted and answered
// anew (each as a branch), pictures, tools, and what the answer costs while it comes. The server keeps
// nothing: each order sends the whole conversation, with its pictures as files.

import {
  add, beside, besides, busy, changed, events, form, isOff, made, order, refuse, send, showBreak, showCost,
  showWords,
} from "../playground.js";
import { markdown } from "./markdown.js";
import { empty, put } from "./sources.js";
import { Growing, Ticker, showTokens } from "./text.js";

const { message, messages: kept, images: pictures } = form.elements;
const columns = [];
const place = add(made, "div", { className: "columns" });

function button(parent, label, act) {
  const node = add(parent, "button", { type: "button", className: "quiet small", textContent: label });
  node.addEventListener("click", act);
  return node;
}

/** The messages as JSON, which names pictures by their places among the files. */
function packed(messages) {
  const files = [];
  const name = (_, value) => (value instanceof File ? `file:${files.push(value) - 1}` : value);
  return { messages: JSON.stringify(messages, name), pictures: files };
}

const partsOf = (content) => (Array.isArray(content) ? content : [{ type: "text", text: content ?? "" }]);
const picturesOf = (content) => partsOf(content).filter(({ type }) => type === "image_url");
const textOf = (content) => partsOf(content).map(({ text }) => text ?? "").join("");

/** A message of a text and pictures: files, or addresses of what was sent before. */
function contentOf(text, images) {
  return images.length ? [...(text ? [{ type: "text", text }] : []), ...images] : text;
}

/** Return the address at which a picture is shown; null if it is somebody else's. */
function shownAt(url) {
  if (url instanceof File) return URL.createObjectURL(url);
  if (`${url}`.startsWith("file-")) return `/console/files/${url}/content`;
  const [, request, sent, place] = /^(req_\w+)\/(sent-)?(\d+)$/.exec(url) ?? [];
  return request ? `/console/requests/${request}/${sent ? "attachments" : "media"}/${place}` : null;
}

function asJson(text) {
  try {
    return /^\s*[{[]/.test(text) ? JSON.stringify(JSON.parse(text), null, 2) : null;
  } catch {
    return null;
  }
}

/** Show an answer as Markdown or JSON, with its text beside it. */
function showAnswer(parent, text) {
  const plain = add(parent, "div", { className: "answered", textContent: text });
  const json = asJson(text);
  let shown = null;
  try {
    shown = json ? [Object.assign(document.createElement("pre"), { tabIndex: 0, textContent: json })] : markdown(text);
  } catch {
    return null; // nested too deeply
  }
  if (shown.length === 1 && shown[0].textContent === text && !shown[0].children.length) return null;
  const formatted = document.createElement("div");
  formatted.className = "formatted";
  formatted.append(...shown);
  plain.before(formatted);
  plain.hidden = true;
  return () => {
    plain.hidden = !plain.hidden;
    formatted.hidden = !formatted.hidden;
    return formatted.hidden;
  };
}

/** A conversation with one model: a tree of messages, of which one branch is chosen. */
class Column {
  constructor(model) {
    this.model = model;
    this.root = { children: [], chosen: 0 };
    this.node = add(place, "section", { className: "column" });
    this.title = add(this.node, "h3", { textContent: model });
    this.thread = add(this.node, "div");
  }

  path() {
    const found = [];
    for (let node = this.root; (node = node.children[node.chosen]); ) found.push(node);
    return found;
  }

  last() {
    return this.path().at(-1) ?? this.root;
  }

  /** Add a message after another one, as a new branch if that was answered before. */
  put(parent, sent) {
    const node = { sent, parent, children: [], chosen: 0, view: null };
    parent.chosen = parent.children.push(node) - 1;
    return node;
  }

  remove(node) {
    const { parent } = node;
    const at = parent.children.indexOf(node);
    parent.children.splice(at, 1, ...node.children);
    for (const child of node.children) child.parent = parent;
    parent.chosen = Math.max(0, Math.min(at + node.chosen, parent.children.length - 1));
    this.show();
  }

  sent() {
    return packed(this.path().map((node) => node.sent));
  }

  show() {
    this.title.hidden = columns.length < 2;
    this.display(this.path());
    if (this === columns[0]) {
      kept.value = this.sent().messages;
      message.required = !this.answerable();
    }
  }

  /** Show messages, and leave the focus where it was: at the same button, or at the new message. */
  display(nodes, ...more) {
    const active = this.thread.contains(document.activeElement) ? document.activeElement : null;
    const label = active?.textContent;
    const at = [...this.thread.children].indexOf(active?.closest("article"));
    this.thread.replaceChildren(...nodes.map((node) => this.view(node)), ...more);
    if (!active) return;
    const near = [...(this.thread.children[at]?.querySelectorAll("button") ?? [])];
    const found = active.isConnected ? active : near.find((each) => each.textContent === label);
    (found ?? message).focus({ preventScroll: true });
  }

  answerable() {
    return ["user", "tool"].includes(this.last().sent?.role);
  }

  view(node) {
    const { role, content, tool_calls: calls } = node.sent;
    if (!node.view) {
      const view = (node.view = document.createElement("article"));
      view.dataset.role = role;
      let swap = null;
      if (role === "assistant") {
        if (content) swap = showAnswer(view, content);
        if (calls) this.showCalls(view, node, calls);
      } else {
        const label = role === "tool" ? "Result: " : "";
        const text = textOf(content);
        if (text) add(view, "p", { className: "said", textContent: `${label}${text}` });
        const seen = picturesOf(content);
        const shelf = seen.length ? add(view, "div", { className: "media shelf" }) : null;
        seen.forEach(({ image_url: { url } }, at) => {
          const src = shownAt(url);
          const name = url.name ?? `Picture ${at + 1}`;
          if (src) add(add(shelf, "figure"), "img", { src, alt: name });
          else add(shelf, "p", { className: "hint", textContent: name });
        });
      }
      const row = add(view, "p", { className: "row acts" });
      node.branches = add(row, "span", { className: "row" });
      button(row, "Edit", () => this.edit(node));
      button(row, "Delete", () => this.remove(node));
      if (role === "assistant") button(row, "Answer again", () => busy((signal) => this.answer(node.parent, signal)));
      if (swap) {
        const toggle = button(row, "As text", () => (toggle.textContent = swap() ? "As written" : "As text"));
      }
      if (node.tokens) showTokens(view, node.tokens);
      if (node.state) view.append(node.state);
    }
    const { parent } = node;
    node.branches.replaceChildren();
    if (parent.children.length > 1) {
      const go = (by) => {
        parent.chosen = (parent.chosen + by + parent.children.length) % parent.children.length;
        this.show();
      };
      button(node.branches, "‹", () => go(-1)).setAttribute("aria-label", "Previous branch");
      add(node.branches, "span", { textContent: `${parent.chosen + 1} of ${parent.children.length}` });
      button(node.branches, "›", () => go(1)).setAttribute("aria-label", "Next branch");
    }
    return node.view;
  }

  /** Show what functions the model calls, with a field for the result of each. */
  showCalls(view, node, calls) {
    const fields = calls.map(({ function: { name, arguments: given } }) => {
      const box = add(view, "div", { className: "call" });
      add(box, "p", { textContent: `Calls ${name}` });
      add(box, "pre", { tabIndex: 0, textContent: asJson(given) ?? given });
      return add(add(box, "label", { textContent: "Its result" }), "textarea", { rows: 2 });
    });
    button(view, calls.length > 1 ? "Send results" : "Send result", () => {
      let last = node;
      calls.forEach(({ id }, at) => {
        last = this.put(last, { role: "tool", tool_call_id: id, content: fields[at].value });
      });
      this.show();
      busy((signal) => this.answer(last, signal));
    });
  }

  edit(node) {
    const { view, sent } = node;
    const box = document.createElement("div");
    const field = add(box, "textarea", { value: textOf(sent.content), rows: 4 });
    field.setAttribute("aria-label", "Message");
    const row = add(box, "p", { className: "row" });
    button(row, sent.role === "assistant" ? "Keep as a branch" : "Send as a branch", () => {
      const made = this.put(node.parent, { ...sent, content: contentOf(field.value, picturesOf(sent.content)) });
      this.show();
      if (sent.role !== "assistant") busy((signal) => this.answer(made, signal));
    });
    button(row, "Cancel", () => {
      box.replaceWith(view);
      view.querySelector("button").focus();
    });
    view.replaceWith(box);
    field.focus();
  }

  /** Order the answer to a message, and show it while it comes. */
  async answer(parent, signal) {
    const trail = [];
    for (let node = parent; node.sent; node = node.parent) trail.unshift(node.sent);
    const values = { model: this.model, ...packed(trail), message: "", images: [], "from-images": "" };
    const response = await send(form.action, "text/event-stream", { values, signal });
    const view = add(this.thread, "article");
    view.dataset.role = "assistant";
    // Whatever follows the message belongs to another branch.
    this.display(this.before(parent), view);
    view.scrollIntoView({ block: "nearest" });
    const growing = new Growing(view);
    const thoughts = document.createElement("details");
    add(thoughts, "summary", { textContent: "Reasoning" });
    const thought = thoughts.appendChild(new Text(""));
    const state = add(view, "div", { className: "hint", textContent: "Waiting …" });
    const ticker = new Ticker(state);
    const answered = { text: "", calls: [], path: "" };
    try {
      for await (const [name, data] of events(response)) {
        if (name === "accepted") {
          answered.path = data.path;
          ticker.most = data.most;
          state.textContent = `Held ${data.held}. Waiting …`;
        }
        if (name === "failed") state.textContent = data.message;
        if (name === "text") {
          answered.text += data.text;
          answered.calls.push(...(data.calls ?? []));
          growing.push(data.text);
          if (data.reasoning) {
            view.prepend(thoughts);
            thought.appendData(data.reasoning);
          }
          ticker.show(data);
        }
        if (name === "ended") {
          ticker.end();
          showCost(state, data, answered.path);
          showWords(data.unknown);
          [answered.tokens] = data.tokens;
          if (data.status === "succeeded") return this.finish(parent, answered, state);
        }
      }
    } catch {
      ticker.end();
      showBreak(state, answered.path, signal);
      if (answered.text) return this.finish(parent, answered, state);
    }
    growing.flush();
    return null;
  }

  before(node) {
    const found = [];
    for (let each = node; each.sent; each = each.parent) found.unshift(each);
    return found;
  }

  finish(parent, { text, calls, tokens }, state) {
    const sent = { role: "assistant", content: text };
    if (calls.length) {
      sent.tool_calls = calls.map(({ id, name, arguments: given }) => ({
        id, type: "function", function: { name, arguments: given },
      }));
    }
    const node = this.put(parent, sent);
    Object.assign(node, { state, tokens });
    this.show();
    return node;
  }
}

/** Have a column for each model that is chosen; a new one starts with what was said to the first. */
function arrange() {
  const wanted = [form.elements.model.value, ...beside.map((each) => each.value).filter(Boolean)];
  wanted.forEach((model, at) => {
    const found = columns[at];
    if (found && found.model === model) return;
    const column = new Column(model);
    for (const { sent } of columns[0]?.path() ?? []) column.put(column.last(), { ...sent });
    found?.node.replaceWith(column.node);
    columns[at] = column;
  });
  for (const column of columns.splice(wanted.length)) column.node.remove();
  for (const column of columns) column.show();
  made.closest(".play").classList.toggle("many", columns.length > 1);
}

// What was said before, which the first column takes the place of.
const earlier = JSON.parse(kept.value || "[]");
arrange();
besides.values = () => ({ pictures: columns[0].sent().pictures });
for (const sent of earlier) columns[0].put(columns[0].last(), sent);
columns[0].show();
for (const each of beside) each.addEventListener("change", arrange);
// The price again, now that the conversation is part of the form.
changed();

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!order || isOff(order)) return;
  const text = message.value.trim();
  const files = [...(pictures?.files ?? [])];
  // What was made before goes with the first message.
  const origin = form.querySelector("[data-origin]:not([hidden]) input");
  const urls = [...(origin ? origin.value.split(" ") : []), ...files];
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = contentOf(text, images);
  busy(async (signal) => {
    const asked = columns.map((column) => {
      const parent = content.length ? column.put(column.last(), { role: "user", content }) : column.last();
      column.show();
      return column.answer(parent, signal).then(() => null, (error) => ({ error, column, parent }));
    });
    message.value = "";
    if (files.length) empty(pictures);
    const refused = (await Promise.all(asked)).filter(Boolean);
    // What was not accepted is in the form again, to be sent once more.
    if (content.length) for (const { column, parent } of refused) column.remove(parent);
    if (refused.length === columns.length) {
      message.value = text;
      if (files.length) put(pictures, files);
    } else {
      form.querySelector("[data-origin]")?.remove();
    }
    message.focus({ preventScroll: true });
    changed();
    if (!refused.length) return;
    const [{ error, column }] = refused;
    if (columns.length > 1) error.message = `${column.model}: ${error.message}`;
    throw error;
  });
});

if (!pictures) {
  // A picture that is pasted or dropped here would be lost without a word.
  const tell = (event, { files = [] }) => {
    if (![...files].some(({ type }) => type.startsWith("image/"))) return;
    event.preventDefault();
    refuse({ message: `${form.elements.model.value} reads no pictures.` });
  };
  message.addEventListener("paste", (event) => tell(event, event.clipboardData ?? {}));
  message.addEventListener("dragover", (event) => event.preventDefault());
  message.addEventListener("drop", (event) => tell(event, event.dataTransfer));
}
