// What is known of the pair that is chosen and, beside it, of the one that is pinned.

const labelOf = ({ row, column }) => [run.rows[row], run.columns[column]].map(shortened).join(", ");

// A line of the table: its name, the text for a pair, and its number where there is a difference.
function matrixLine(packed, name, text) {
  const at = ({ row, column }) => valuesOf(packed)[row * columns + column];
  return {
    head: () => term(name, text),
    text: (pair) => shown(at(pair), packed.decimals),
    difference: (pair, pinned) => shown(at(pair) - at(pinned), packed.decimals),
  };
}

function curveLine({ name, values }) {
  const at = (n) => (values[n] === null ? "not finite" : signed(+values[n].toPrecision(4)));
  return {
    head: () => term(name, words(name)),
    text: ({ row, column }) => (run.oneSet ? `${at(row)}, ${at(column)}` : at(column)),
    difference: () => "",
  };
}

function readoutLines(slice) {
  const pair = {
    head: () => document.createTextNode("row, column"),
    text: labelOf,
    difference: () => "",
  };
  const matrices = run.parts.length ? [current()] : run.matrices; // parts are many
  const lines = matrices.map((packed) => matrixLine(packed, packed.name, words(packed.name)));
  if (slice !== null) lines.push(matrixLine(slice, "slices", `slice of output ${slice.name}`));
  return [pair, ...lines, ...run.curves.map(curveLine)];
}

let readout = [];

// The table without its numbers: built when its lines change, so that the focus stays.
function buildReadout(slice, isPinned) {
  const heads = ["", "pair"];
  if (isPinned) heads.push("pinned", "difference");
  const header = element("tr");
  header.append(...heads.map((text) => cell("th", text)));
  readout = readoutLines(slice).map((line) => {
    const made = element("tr");
    const head = element("th");
    head.append(line.head());
    made.append(head, ...heads.slice(1).map(() => element("td")));
    return { line, cells: [...made.cells].slice(1), made };
  });
  byId("readout").replaceChildren(header, ...readout.map(({ made }) => made));
}

function drawReadout(pair, pinned) {
  for (const { line, cells } of readout) {
    const texts = [line.text(pair)];
    if (pinned !== null) texts.push(line.text(pinned), line.difference(pair, pinned));
    texts.forEach((text, n) => {
      cells[n].textContent = text;
      cells[n].title = text;
    });
  }
  byId("row").selectedIndex = pair.row;
  byId("column").selectedIndex = pair.column;
  const isHere = isAt(pinned, pair);
  byId("pin").textContent = isHere ? "Unpin" : "Pin";
  byId("pin").setAttribute("aria-pressed", String(isHere));
}
