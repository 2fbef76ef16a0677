// Line numbers beside the catalog's text, and links that lead to a line of it.

const area = document.querySelector(".editor textarea");

if (area) {
  const gutter = document.createElement("div");
  gutter.className = "gutter";
  gutter.setAttribute("aria-hidden", "true");
  area.before(gutter);
  const wrong = new Set([...document.querySelectorAll("#problems [data-line]")].map((link) => Number(link.dataset.line)));
  let shown = 0;

  const number = () => {
    const count = area.value.split("\n").length;
    while (shown < count) {
      const line = document.createElement("span");
      shown += 1;
      line.textContent = shown;
      if (wrong.has(shown)) line.className = "wrong";
      gutter.append(line);
    }
    while (shown > count) {
      gutter.lastChild.remove();
      shown -= 1;
    }
  };
  const follow = () => {
    gutter.scrollTop = area.scrollTop;
  };
  const show = (line, column) => {
    const lines = area.value.split("\n");
    const at = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    const end = at + (lines[line - 1] ?? "").length;
    area.focus();
    area.setSelectionRange(Math.min(at + column - 1, end), end);
    area.scrollTop = Math.max(0, (line - 6) * parseFloat(getComputedStyle(area).lineHeight));
    follow();
  };

  area.addEventListener("input", number);
  area.addEventListener("scroll", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-line]");
    if (!link) return;
    event.preventDefault();
    show(Number(link.dataset.line), Number(link.dataset.column));
  });
  number();
}
