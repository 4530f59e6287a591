// Trajectories as lines, checkpoints as points of a plane.

// Drawn to the width there is, so that text keeps its size.
const widthOf = (svg) => Math.max(svg.clientWidth, 240);

const path = (points) =>
  points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

const LETTER = 6.5; // pixels
const longestRow = () => Math.max(...run.rows.map((label) => shortened(label).length));

const columnOf = (values, j) => Array.from({ length: rows }, (_, i) => values[i * columns + j]);

// The lines of the picture: [text, a value for every row, colour, dashes].
function trajectories(values, column, pinned) {
  const last = columns - 1;
  const nameOf = (j) => shortened(run.columns[j]);
  const lines = [[`to ${nameOf(last)}`, columnOf(values, last), PALETTE[0], ""]];
  if (run.oneSet && rows > 1) {
    const before = Array.from({ length: rows }, (_, i) => (i ? values[i * columns + i - 1] : NaN));
    lines.push(["to the one before", before, PALETTE[1], "5 3"]);
  }
  if (column !== last) {
    const text = `to ${nameOf(column)} (the pair's column)`;
    lines.push([text, columnOf(values, column), PALETTE[2], "1.5 3"]);
  }
  if (pinned !== null && pinned.column !== last && pinned.column !== column) {
    const text = `to ${nameOf(pinned.column)} (the pinned column)`;
    lines.push([text, columnOf(values, pinned.column), "#ff5fc4", "1.5 3"]);
  }
  return lines;
}

function heights(lines) {
  const finite = lines.flatMap(([, line]) => line).filter(Number.isFinite);
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  if (low >= -1 && high <= 1 + 1e-6) {
    low = Math.min(Math.floor(5 * low) / 5, 0);
    high = 1;
  }
  if (high > low) return [low, high];
  low = Number.isFinite(low) ? low - 0.5 : 0;
  return [low, low + 1];
}

function drawTrajectory(values, { row, column, pinned }, points, W) {
  const svg = byId("trajectory");
  const [H, left, right, top] = [240, 52, 14, 10];
  const below = 16 + LETTER * longestRow();
  const lines = trajectories(values, column, pinned);
  const [low, high] = heights(lines);
  const x = (n) => left + (W - left - right) * (rows > 1 ? n / (rows - 1) : 0.5);
  const y = (v) => top + (H - top - below) * (1 - (v - low) / (high - low));
  const upright = (n, style) =>
    element("line", null, { x1: x(n), x2: x(n), y1: top, y2: H - below, ...style });
  const drawn = [];
  for (const v of roundNumbers(low, high)) {
    const across = { x1: left, x2: W - right, y1: y(v), y2: y(v), stroke: "var(--line)" };
    drawn.push(element("line", null, across));
    drawn.push(element("text", signed(v), { x: left - 6, y: y(v) + 4, "text-anchor": "end" }));
  }
  for (let n = 0; n < rows; n += Math.ceil((rows * 15) / (W - left - right))) {
    const transform = `translate(${x(n) + 4} ${H - below + 8}) rotate(-90)`;
    drawn.push(element("text", shortened(run.rows[n]), { transform, "text-anchor": "end" }));
  }
  for (const p of points)
    drawn.push(upright(p - 0.5, { stroke: "var(--soft)", "stroke-dasharray": "2 3" }));
  for (const [, line, stroke, dashes] of lines) {
    const placed = line.map((v, n) => [x(n), y(v)]).filter(([, v]) => Number.isFinite(v));
    const style = { fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dashes };
    drawn.push(element("path", null, { d: path(placed), ...style }));
    if (rows > 60) continue;
    for (const [cx, cy] of placed)
      drawn.push(element("circle", null, { cx, cy, r: 2.4, fill: stroke }));
  }
  drawn.push(upright(row, { stroke: "var(--accent)", opacity: 0.5 }));
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.replaceChildren(...drawn);
  byId("legend").replaceChildren(...lines.map(legendEntry));
}

function legendEntry([text, , stroke, dashes]) {
  const entry = element("span");
  const kind = dashes ? "dashed" : "solid";
  entry.append(element("i", null, { style: `border-color:${stroke};border-top-style:${kind}` }));
  entry.append(text);
  return entry;
}

// --- the plane -----------------------------------------------------------------------------------

// Where the points stand, both axes to one scale, with room for labels at the sides.
function placedPoints(W, H) {
  const edges = [14 + LETTER * longestRow(), 20];
  const { points } = run.embedding;
  const bounds = [0, 1].map((axis) => {
    const along = points.map((point) => point[axis]);
    return [Math.min(...along), Math.max(...along)];
  });
  const units = bounds.map(([low, high], c) => ([W, H][c] - 2 * edges[c]) / (high - low || 1e-9));
  const unit = Math.min(...units, 1e4);
  const [across, up] = bounds.map(([low, high]) => (low + high) / 2);
  return points.map(([x, y]) => [W / 2 + unit * (x - across), H / 2 - unit * (y - up)]);
}

function drawPlane({ row, column, pinned }, phaseOf, W) {
  const svg = byId("plane");
  const H = 330;
  const placed = placedPoints(W, H);
  const chosen = new Set([row, column]);
  const held = new Set(pinned === null ? [] : [pinned.row, pinned.column]);
  const joined = { d: path(placed), fill: "none", stroke: "var(--line)", "stroke-width": 1.5 };
  const drawn = [element("path", null, joined)];
  const radius = (n) => (chosen.has(n) || held.has(n) ? 7 : 4);
  placed.forEach(([cx, cy], n) => {
    const r = radius(n);
    let stroke = "none";
    if (held.has(n)) stroke = "#ff5fc4";
    if (chosen.has(n)) stroke = "var(--ink)";
    const style = { r, fill: paletteAt(phaseOf(n)), stroke, "stroke-width": 2 };
    const dot = element("circle", null, { cx, cy, ...style });
    dot.append(element("title", String(run.rows[n])));
    drawn.push(dot);
  });
  const taken = [];
  for (const n of [row, column, ...held, rows - 1, 0, ...placed.keys()]) {
    const [x, y] = placed[n];
    const away = x < W / 2 ? -1 : 1;
    const text = shortened(run.rows[n]);
    const length = 10 + LETTER * text.length;
    if (taken.some(([u, v]) => Math.abs(u - x) < length && Math.abs(v - y) < 13)) continue;
    taken.push([x, y]);
    const anchor = away < 0 ? "end" : "start";
    const beside = x + (radius(n) + 5) * away;
    drawn.push(element("text", text, { x: beside, y: y + 4, "text-anchor": anchor }));
  }
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.replaceChildren(...drawn);
}

function sayShare() {
  const { share, negative } = run.embedding;
  const percent = (x) => `${(100 * x).toFixed(0)} %`;
  let rest = ".";
  if (negative > 0.0001) {
    const lost = (100 * negative).toFixed(2);
    rest = `; negative eigenvalues, ${lost} % of the spectrum, are left out.`;
  }
  byId("share").replaceChildren(
    "Classical scaling of the ",
    term("chords", "chords √(2 − 2 cos)"),
    `: the axes hold ${percent(share[0])} and ${percent(share[1])} of the variance${rest}`,
  );
}
