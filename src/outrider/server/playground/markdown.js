// Markdown as elements: a small subset, of which nothing is ever read as HTML.

const DEEPEST = 16; // quotes and lists within each other, beyond which a text stays as it is
const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SPANS = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([^*]*?\S)\*|\[([^\]]*)\]\(([^()\s]+)\)/g;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

// Elements of a line: code, strong, emphasis and links.
function spans(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(SPANS)) {
    parts.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    const [whole, , code, strong, emphasis, label, target] = found;
    if (code !== undefined) parts.push(element("code", code.trim()));
    else if (strong !== undefined) parts.push(element("strong", ...spans(strong)));
    else if (emphasis !== undefined) parts.push(element("em", ...spans(emphasis)));
    else parts.push(link(label, target) ?? whole);
  }
  parts.push(text.slice(at));
  return parts;
}

// A link to the web; null for any other target.
function link(label, target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const made = element("a", label);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function code(lines, language) {
  const text = lines.join("\n");
  const block = element("pre", element("code", text));
  block.tabIndex = 0;
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.addEventListener("click", () => copied(copy, text));
  const bar = element("div", element("span", language.trim()), copy);
  bar.className = "code-bar";
  const whole = element("div", bar, block);
  whole.className = "code";
  return whole;
}

// Puts a text into the clipboard, and says so on the button; where a page may not, it is selected.
export async function copied(button, text) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = name; }, 1500);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(head, rows) {
  const row = (kind, line) => element("tr", ...cells(line).map((cell) => element(kind, ...spans(cell))));
  const made = element("table", element("thead", row("th", head)), element("tbody", ...rows.map((r) => row("td", r))));
  const scroll = element("div", made);
  scroll.className = "table";
  return scroll;
}

// The items of a list that begins at a line: deeper ones are lists of their own.
function list(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const ordered = /\d/.test(mark);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(mark, 10);
  let at = start;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (found && found[1].length > indent.length && made.lastChild && depth < DEEPEST) {
      const [inner, next] = list(lines, at, depth + 1);
      made.lastChild.append(inner);
      at = next;
    } else if (found && found[1].length >= indent.length && /\d/.test(found[2]) === ordered) {
      made.append(element("li", ...spans(found[3])));
      at += 1;
    } else if (!found && lines[at].trim() && /^\s{2,}/.test(lines[at]) && made.lastChild) {
      made.lastChild.append(" ", ...spans(lines[at].trim()));
      at += 1;
    } else break;
  }
  return [made, at];
}

// The elements of a text in Markdown.
export function rendered(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const starts = (line) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((pattern) => pattern.test(line));
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      blocks.push(code(lines.slice(at + 1, end), fence[2]));
      at = end + 1;
    } else if (heading) {
      blocks.push(element(`h${Math.min(6, heading[1].length + 2)}`, ...spans(heading[2])));
      at += 1;
    } else if (RULE.test(line)) {
      blocks.push(element("hr"));
      at += 1;
    } else if (ITEM.test(line)) {
      const [made, next] = list(lines, at, depth);
      blocks.push(made);
      at = next;
    } else if (QUOTE.test(line)) {
      let end = at;
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      const inner = lines.slice(at, end).map((each) => QUOTE.exec(each)[1]).join("\n");
      blocks.push(element("blockquote", ...rendered(inner, depth + 1)));
      at = end;
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      let end = at + 2;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      blocks.push(table(line, lines.slice(at + 2, end)));
      at = end;
    } else if (!line.trim()) {
      at += 1;
    } else {
      let end = at + 1;
      while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
      blocks.push(element("p", ...spans(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return blocks;
}
