// Texts while they are written: what came so far, what that costs, and how likely each token was.

import { add } from "../playground.js";

/** Text that grows: appended once per frame, a block for each line, so that long answers stay fluent. */
export class Growing {
  /** Begin after a text that was there before. */
  constructor(parent, before = "") {
    this.node = add(parent, "div", { className: "answered growing" });
    this.waiting = "";
    this.frame = 0;
    this.line = null;
    if (!before) return;
    const line = add(this.node, "div");
    add(line, "span", { className: "quiet-text", textContent: before });
    this.line = line.appendChild(new Text(""));
  }

  push(text) {
    this.waiting += text;
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.waiting) return;
    const lines = this.waiting.split("\n");
    this.waiting = "";
    lines.forEach((text, number) => {
      if (number || !this.line) this.line = add(this.node, "div").appendChild(new Text(""));
      this.line.appendData(text);
    });
  }
}

/** Show how likely each token was; the rows are made when they are looked at. */
export function showTokens(parent, { tokens, count }, of = "") {
  const box = add(parent, "details", { className: "tokens" });
  const name = `Log probabilities${of}`;
  add(box, "summary", { textContent: name });
  const make = () => {
    const scroll = add(box, "div", { className: "table", tabIndex: 0 });
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", name);
    const table = add(scroll, "table", { className: "rows" });
    const head = add(add(table, "thead"), "tr");
    ["Token", "Log probability", "Chance", "Others"].forEach((textContent, at) => {
      add(head, "th", { scope: "col", textContent, className: at === 1 ? "number" : "" });
    });
    const body = add(table, "tbody");
    for (const { text, logprob, chance, percent, others } of tokens) {
      const row = add(body, "tr");
      add(add(row, "th", { scope: "row" }), "code", { textContent: text });
      add(row, "td", { className: "number", textContent: logprob });
      const cell = add(row, "td", { className: "fit" });
      add(cell, "meter", { value: chance }).setAttribute("aria-hidden", "true");
      cell.append(` ${percent}`);
      add(row, "td", { textContent: others });
    }
    if (count > tokens.length) {
      add(box, "p", { className: "hint", textContent: `The first ${tokens.length} of ${count} tokens.` });
    }
  };
  box.addEventListener("toggle", make, { once: true });
}

/** What a text has cost so far, shown once per frame. The amounts are texts of the server. */
export class Ticker {
  constructor(state) {
    Object.assign(this, { state, most: "", started: 0, frame: 0 });
  }

  show({ cost, tokens }) {
    if (!cost) return;
    this.started ||= performance.now();
    Object.assign(this, { cost, tokens });
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const seconds = (performance.now() - this.started) / 1000;
      const speed = seconds > 0.2 ? ` · ${(this.tokens / seconds).toFixed(0)} tokens/s` : "";
      this.state.textContent = `${this.cost} so far of at most ${this.most}${speed}`;
    });
  }

  end() {
    cancelAnimationFrame(this.frame);
  }
}
