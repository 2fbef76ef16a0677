// Draws the sounds of a page once they are in view, also of a request that ends while it is open.

import { draw } from "./drawings.js";

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    const { drawn, source } = target.dataset;
    delete target.dataset.drawn;
    draw(target, drawn, source);
  }
});

function watch() {
  for (const canvas of document.querySelectorAll("canvas[data-drawn]")) seen.observe(canvas);
}

document.addEventListener("htmx:after:swap", watch);
watch();
