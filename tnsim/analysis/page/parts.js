// Parts of transformers, layer by head: each cell has the value of the chosen pair in the matrix of
// one part, and opens this matrix.

let partCells = [];

function makePart(matrix, choose) {
  const made = element("td");
  if (matrix === null) return made;
  const { name } = run.matrices[matrix];
  const button = element("button", null, { type: "button", class: "part", "aria-label": name });
  button.title = name;
  button.addEventListener("click", () => choose(matrix));
  partCells.push({ button, matrix });
  made.append(button);
  return made;
}

// A table for each kind: a line for each layer, a column for each head.
function buildParts(choose) {
  partCells = [];
  // Below the first layer that has parts, as below attention behind an embedding, is nothing.
  const filled = (line) => line.some((matrix) => matrix !== null);
  const layered = run.parts.filter(({ grid }) => grid.length > 1);
  const first = Math.min(...layered.map(({ grid }) => grid.findIndex(filled)));
  const tables = run.parts.map(({ kind, grid }) => {
    const table = element("table", null, { class: "parts" });
    table.append(element("caption", kind));
    const lines = grid.slice(grid.length > 1 ? first : 0).map((line, layer) => {
      const made = element("tr");
      if (grid.length > 1) made.append(element("th", String(first + layer)));
      made.append(...line.map((matrix) => makePart(matrix, choose)));
      return made;
    });
    table.append(...lines.reverse()); // the first layer at the bottom, as rows of a matrix
    return table;
  });
  byId("partTables").replaceChildren(...tables);
}

const rangeOfParts = run.partScale && rangeOf(run.partScale);

function drawParts({ row, column }, shownMatrix) {
  for (const { button, matrix } of partCells) {
    const packed = run.matrices[matrix];
    const value = valuesOf(packed)[row * columns + column];
    const [red, green, blue] = colourAt(value, rangeOfParts);
    button.style.background = `rgb(${red}, ${green}, ${blue})`;
    button.style.color = 0.3 * red + 0.6 * green + 0.1 * blue > 140 ? "#000" : "#fff";
    button.textContent = Number.isFinite(value) ? rounded(value, 2) : "–";
    button.setAttribute("aria-pressed", String(matrix === shownMatrix));
  }
}
