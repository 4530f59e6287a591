// Elements of the page. Text of a run is only ever set as text, never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = ["path", "circle", "line", "text", "title"];

function element(tag, text = null, attributes = {}) {
  const made = DRAWN.includes(tag)
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// A cell; one that says what others are is explained where it can be.
function cell(tag, text) {
  const made = element(tag);
  made.append(tag === "th" ? term(text.replaceAll(" ", "_"), text) : text);
  made.title = text;
  return made;
}

// A table whose first line, or else whose first column, says what the others are.
function fillTable(table, lines, header) {
  const line = (texts, n) => {
    const made = element("tr");
    const tag = (m) => (header ? n === 0 : m === 0) ? "th" : "td";
    made.append(...texts.map((text, m) => cell(tag(m), text)));
    return made;
  };
  table.replaceChildren(...lines.map(line));
}

function fillSelect(select, texts) {
  select.replaceChildren(...texts.map((text) => element("option", text)));
}
