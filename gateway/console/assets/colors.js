// The colours of the theme, for what is drawn on a canvas.

export const color = (name) => {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};
