// Markdown as nodes: headings, lists, tables, quotes, code, emphasis and links. There is no HTML and
// no pictures; whatever is not one of these stays text.

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1|\*\*([^*\n]+?)\*\*|\*([^*\s][^*\n]*?)\*|\[([^\]\n]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+)/g;

function make(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

/** A link that shows where it leads; anything but the web stays text. */
function link(label, target) {
  if (!/^https?:\/\//i.test(target) || !URL.canParse(target)) return [`[${label}](${target})`];
  const node = make("a", label);
  Object.assign(node, { href: target, rel: "noreferrer noopener nofollow", target: "_blank" });
  return label === target ? [node] : [node, ` (${target})`];
}

function inline(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    found.push(text.slice(end, match.index));
    const [whole, , code, strong, soft, label, target, bare] = match;
    if (code !== undefined) found.push(make("code", code));
    else if (strong !== undefined) found.push(make("strong", ...inline(strong)));
    else if (soft !== undefined) found.push(make("em", ...inline(soft)));
    else if (label !== undefined) found.push(...link(label, target));
    else found.push(...link(bare, bare));
    end = match.index + whole.length;
  }
  found.push(text.slice(end));
  return found.filter((each) => each !== "");
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((each) => each.trim());
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/;

function table(lines) {
  const head = make("tr", ...cells(lines[0]).map((each) => Object.assign(make("th", ...inline(each)), { scope: "col" })));
  const rows = lines.slice(2).map((line) => make("tr", ...cells(line).map((each) => make("td", ...inline(each)))));
  const node = make("div", make("table", make("thead", head), make("tbody", ...rows)));
  Object.assign(node, { className: "table", tabIndex: 0 });
  return node;
}

/** A list whose deeper items are lists within the item before them. */
function list(lines) {
  const [, depth, mark] = ITEM.exec(lines[0]);
  const node = make(/\d/.test(mark) ? "ol" : "ul");
  if (node.tagName === "OL") node.start = Number.parseInt(mark, 10);
  let inner = [];
  const close = () => {
    if (inner.length) node.lastChild.append(list(inner));
    inner = [];
  };
  for (const line of lines) {
    const [, indent, , text] = ITEM.exec(line) ?? [];
    if (text === undefined) {
      if (inner.length) inner.push(line);
      else node.lastChild?.append(" ", ...inline(line.trim()));
    } else if (indent.length > depth.length + 1) {
      inner.push(line);
    } else {
      close();
      node.append(make("li", ...inline(text)));
    }
  }
  close();
  return node;
}

/** Return the blocks of a text as nodes. */
export function markdown(source) {
  const lines = source.split("\n");
  const blocks = [];
  let place = 0;
  const take = (wanted) => {
    const start = place;
    while (place < lines.length && wanted(lines[place])) place += 1;
    return lines.slice(start, place);
  };
  while (place < lines.length) {
    const line = lines[place];
    const fence = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (!line.trim()) {
      place += 1;
    } else if (fence) {
      place += 1;
      const code = take((each) => !each.trim().startsWith(fence[1]));
      place += 1;
      const node = make("pre", make("code", code.join("\n")));
      node.tabIndex = 0;
      blocks.push(node);
    } else if (heading) {
      place += 1;
      // Below the page's own headings.
      blocks.push(make(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      place += 1;
      blocks.push(make("hr"));
    } else if (line.includes("|") && RULE.test(lines[place + 1] ?? "")) {
      blocks.push(table(take((each) => each.includes("|"))));
    } else if (ITEM.test(line)) {
      blocks.push(list(take((each) => each.trim() && (ITEM.test(each) || /^\s{2,}/.test(each)))));
    } else if (line.startsWith(">")) {
      blocks.push(make("blockquote", ...markdown(take((each) => each.startsWith(">")).map((each) => each.replace(/^>\s?/, "")).join("\n"))));
    } else {
      const start = place;
      const text = take((each) => each.trim() && (place === start || !/^(#{1,6}\s|>|\s*(`{3,}|~{3,}))/.test(each) && !ITEM.test(each)));
      const node = make("p");
      text.forEach((each, number) => node.append(...(number ? [make("br")] : []), ...inline(each.trimEnd())));
      blocks.push(node);
    }
  }
  return blocks;
}
