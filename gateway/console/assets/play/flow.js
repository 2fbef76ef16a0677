// The graph of a workflow: its steps light up as they run, and show what they cost.

import { add, made } from "../playground.js";

const nodes = new Map([...document.querySelectorAll("[data-step]")].map((node) => [node.dataset.step, node]));
const told = document.getElementById("steps-told");

function mark(name, state, text) {
  const node = nodes.get(name);
  if (!node) return;
  node.dataset.state = state;
  node.querySelector(".told").textContent = text;
}

made.addEventListener("order:accepted", () => {
  told.replaceChildren();
  for (const name of nodes.keys()) mark(name, "", "");
});

made.addEventListener("order:progress", ({ detail: { stage } }) => {
  if (!stage) return;
  const done = stage.steps ? ` ${stage.step}/${stage.steps}` : "";
  mark(stage.name, stage.status, `${stage.status}${done}`);
});

made.addEventListener("order:ended", ({ detail }) => {
  for (const step of detail.steps) {
    mark(step.name, step.status, `${step.status}, ${step.cost}`);
    // What the drawing shows is heard from here.
    const [text, className] = step.message ? [step.message, "problem"] : [`${step.status}, ${step.cost}`, "unseen"];
    add(told, "p", { textContent: `${step.name}: ${text}`, className });
  }
});
