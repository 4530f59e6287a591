// Trajectories as lines, checkpoints as points of a plane.

const PINK = "#ff5fc4"; // what is pinned, as in page.css

// Drawn to the width there is, so that text keeps its size.
const widthOf = (svg) => Math.max(svg.clientWidth, 240);

const path = (points) =>
  points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  ruler.font = FONT;
  return ruler.measureText(text).width;
}

const longestRow = () => Math.max(...run.rows.map((label) => textWidth(shortened(label))));

const columnOf = (values, j) => Array.from({ length: rows }, (_, i) => values[i * columns + j]);

// The lines of the picture: [text, a value for every row, colour, dashes].
function trajectories(values, column, pinned) {
  const last = columns - 1;
  const to = (j, what, ...style) =>
    [`to ${shortened(run.columns[j])}${what}`, columnOf(values, j), ...style];
  const lines = [to(last, "", PALETTE[0], "")];
  if (run.oneSet && rows > 1) {
    const before = Array.from({ length: rows }, (_, i) => (i ? values[i * columns + i - 1] : NaN));
    lines.push(["to the one before", before, PALETTE[1], "5 3"]);
  }
  if (column !== last) lines.push(to(column, " (the pair's column)", PALETTE[2], "1.5 3"));
  if (pinned !== null && ![last, column].includes(pinned.column))
    lines.push(to(pinned.column, " (the pinned column)", PINK, "1.5 3"));
  return lines;
}

function heights(lines) {
  const finite = lines.flatMap(([, line]) => line).filter(Number.isFinite);
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  if (low >= -1 && high <= 1 + 1e-6) {
    // As for the colours of a matrix, values near 1 have the room for themselves.
    if (low < 0.9) low = Math.min(Math.floor(5 * low) / 5, 0);
    high = 1;
  }
  if (high > low) return [low, high];
  low = Number.isFinite(low) ? low - 0.5 : 0;
  return [low, low + 1];
}

function drawTrajectory(values, { row, column, pinned }, points, W) {
  const svg = byId("trajectory");
  const lines = trajectories(values, column, pinned);
  const [low, high] = heights(lines);
  const marks = roundNumbers(low, high);
  const longestMark = Math.max(...marks.map((v) => textWidth(signed(v)))); // many digits near 1
  const [H, left, right, top] = [240, Math.max(52, longestMark + 12), 14, 10];
  const below = 16 + longestRow();
  const x = (n) => left + (W - left - right) * (rows > 1 ? n / (rows - 1) : 0.5);
  const y = (v) => top + (H - top - below) * (1 - (v - low) / (high - low));
  const upright = (n, style) =>
    element("line", null, { x1: x(n), x2: x(n), y1: top, y2: H - below, ...style });
  const drawn = [];
  for (const v of marks) {
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
  const edges = [16 + longestRow(), 20];
  const { points } = run.embedding;
  const bounds = [0, 1].map((axis) => {
    const along = points.map((point) => point[axis]);
    return [Math.min(...along), Math.max(...along)];
  });
  const units = bounds.map(([low, high], c) => ([W, H][c] - 2 * edges[c]) / (high - low || 1e-9));
  const unit = Math.min(...units, 1e8); // rounding of equal models stays a point
  const [across, up] = bounds.map(([low, high]) => (low + high) / 2);
  return points.map(([x, y]) => [W / 2 + unit * (x - across), H / 2 - unit * (y - up)]);
}

const MOST_NAMES = 400; // points that are tried for a label
const LINE = 11; // pixels, the height of a line of text

// Eight places for a label around a point, that away from the middle first.
function labelPlaces([x, y], gap, length, [across, down]) {
  const outward = Math.atan2(y - down, x - across);
  return [0, 1, -1, 2, -2, 3, -3, 4].map((eighth) => {
    const angle = (Math.round(outward / (Math.PI / 4)) + eighth) * (Math.PI / 4);
    const parts = [Math.cos(angle), Math.sin(angle)];
    const [right, below] = parts.map((part) => Math.round(10 * part) / 10);
    const left = x + gap * right - length * (1 - Math.sign(right)) / 2;
    const base = y + 4 + (gap + LINE / 2 - 2) * below;
    const box = [left, base - LINE + 2, left + length, base + 2];
    return { x: left, y: base, box };
  });
}

const isWithin = ([left, top, right, bottom], W, H) =>
  left >= 0 && top >= 0 && right <= W && bottom <= H;

const meet = (one, other) =>
  one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];

const coveredDots = (box, dots) =>
  dots.filter(([x, y]) => meet(box, [x - 4, y - 4, x + 4, y + 4])).length;

function drawPlane({ row, column, pinned }, phaseOf, W) {
  const svg = byId("plane");
  const H = 330;
  const placed = placedPoints(W, H);
  const chosen = new Set([row, column]);
  const held = new Set(pinned === null ? [] : [pinned.row, pinned.column]);
  const joined = { d: path(placed), fill: "none", stroke: "var(--line)", "stroke-width": 1.5 };
  const drawn = run.embedding.joined ? [element("path", null, joined)] : [];
  const radius = (n) => (chosen.has(n) || held.has(n) ? 7 : 4);
  placed.forEach(([cx, cy], n) => {
    const r = radius(n);
    let stroke = "none";
    if (held.has(n)) stroke = PINK;
    if (chosen.has(n)) stroke = "var(--ink)";
    const style = { r, fill: paletteAt(phaseOf(n)), stroke, "stroke-width": 2 };
    const dot = element("circle", null, { cx, cy, ...style });
    dot.append(element("title", String(run.rows[n])));
    drawn.push(dot);
  });
  const taken = [];
  const named = [...new Set([row, column, ...held, rows - 1, 0])];
  const step = Math.ceil(rows / MOST_NAMES);
  const others = [...placed.keys()].filter((n) => n % step === 0 && !named.includes(n));
  for (const n of [...named, ...others]) {
    const text = shortened(run.rows[n]);
    const isNamed = named.includes(n);
    const places = labelPlaces(placed[n], radius(n) + 5, textWidth(text), [W / 2, H / 2])
      .slice(0, isNamed ? 8 : 3)
      .filter(({ box }) => isWithin(box, W, H) && !taken.some((other) => meet(box, other)))
      .map((place) => ({ ...place, covered: coveredDots(place.box, placed) }));
    const best = places.sort((one, other) => one.covered - other.covered)[0];
    // Chosen points and the ends of a run keep their names in a crowd.
    if (!best || (best.covered > 0 && !isNamed)) continue;
    const [left, top, right, bottom] = best.box;
    taken.push([left - 8, top - 2, right + 8, bottom + 2]);
    drawn.push(element("text", text, { x: best.x, y: best.y }));
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
