// The division that is chosen: its phases as a table, its scatter and block score.

function meanWithin(values, first, end) {
  let sum = 0;
  let pairs = 0;
  for (let i = first; i < end; i++)
    for (let j = first; j < i; j++) {
      sum += values[i * columns + j];
      pairs++;
    }
  return pairs ? shown(sum / pairs, 3) : "–";
}

function drawPhases({ changePoints, cost, scores }, values, scored, name) {
  const bounds = [0, ...changePoints, rows];
  const lines = [["phase", "first", "last", "count", "mean within"]];
  for (let p = 0; p + 1 < bounds.length; p++) {
    const [first, end] = [bounds[p], bounds[p + 1]];
    const line = [p + 1, run.rows[first], run.rows[end - 1], end - first];
    lines.push([...line.map(String), meanWithin(values, first, end)]);
  }
  const table = byId("segmentation");
  fillTable(table, lines, true);
  [...table.rows].slice(1).forEach((line, p) => {
    const style = `background:${paletteAt(p)}`;
    line.cells[0].prepend(element("span", null, { class: "swatch", style }));
  });
  const said = [term("scatter", "Scatter"), ` within phases ${shown(cost, 3)}`];
  if (Object.hasOwn(scores, scored)) {
    const score = ` of the ${name} ${shown(scores[scored], 3)}`;
    said.push("; ", term("block_score", "block score Δ"), score);
  }
  byId("score").replaceChildren(...said, ".");
}
