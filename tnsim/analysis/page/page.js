// What is chosen, and what follows from it.

const state = { matrix: 0, output: 0, phases: 0, row: rows - 1, column: 0, pinned: null };
const canvas = byId("heatmap");
let drawing = null; // what the matrix is drawn from
let place = null; // where it stands on the canvas
let drawnWidth = null; // what there was room for

const isSliced = () => state.matrix === run.matrices.length;
const slice = () => (run.slices.length ? run.slices[state.output] : null);
const current = () => (isSliced() ? slice() : run.matrices[state.matrix]);
const nameOf = (packed) => (isSliced() ? `slice of output ${packed.name}` : words(packed.name));
const scoreName = () => (isSliced() ? `output ${current().name}` : current().name);
const changePoints = () => (run.phases.length ? run.phases[state.phases].changePoints : []);
const phaseOf = (n) => changePoints().filter((p) => p <= n).length;

// --- drawing: the matrix when it changes, the rest with the pair ---------------------------------

function drawHeatmap() {
  const ink = getComputedStyle(document.body).color;
  drawnWidth = canvas.parentElement.clientWidth;
  place = layout(canvas.getContext("2d"), drawnWidth, 0);
  canvas.style.height = `${place.height}px`;
  const brush = resized(canvas, drawnWidth, place.height, window.devicePixelRatio);
  drawMatrix(brush, place, { ...drawing, ink });
  drawMarks();
}

function putMark(mark, pair) {
  mark.hidden = pair === null;
  if (pair === null) return;
  const { left, top, cell, h } = place;
  const size = Math.max(cell, 7);
  const shift = (cell - size) / 2;
  const x = left + pair.column * cell + shift;
  const y = top + h - (pair.row + 1) * cell + shift;
  mark.style.width = mark.style.height = `${size}px`;
  mark.style.transform = `translate(${x}px, ${y}px)`;
}

function drawMarks() {
  putMark(byId("chosen"), state);
  putMark(byId("pinned"), state.pinned);
}

function drawPair() {
  // widths are read before anything is written, so that the page is laid out once
  const [across, plane] = [widthOf(byId("trajectory")), widthOf(byId("plane"))];
  drawMarks();
  drawTrajectory(valuesOf(current()), state, changePoints(), across);
  if (run.embedding) drawPlane(state, phaseOf, plane);
  if (run.parts.length) drawParts(state, state.matrix);
  drawReadout(state, state.pinned);
  const value = valuesOf(current())[state.row * columns + state.column];
  byId("spoken").textContent = `${labelOf(state)}: ${shown(value, current().decimals)}`;
}

// The same in another width, or in other colours.
function drawAgain() {
  drawHeatmap();
  drawPair();
}

function draw() {
  const packed = current();
  const range = isSliced() ? rangeOfSlices : rangeOf(packed.scale);
  const points = run.oneSet ? changePoints() : [];
  drawing = { picture: painted(valuesOf(packed), range), range, points };
  const name = nameOf(packed);
  byId("heading").replaceChildren(term(isSliced() ? "slices" : packed.name, name));
  canvas.setAttribute("aria-label", `${name}, ${rows} by ${columns}`);
  byId("matrix").selectedIndex = state.matrix;
  byId("count").textContent = state.phases + 1;
  drawHeatmap();
  if (run.slices.length) drawTiles(state.output, isSliced(), chooseOutput);
  if (run.phases.length) drawPhases(run.phases[state.phases], valuesOf(packed), scoreName(), name);
  buildReadout(slice(), state.pinned !== null);
  drawPair();
  closeOrphan();
}

// However many events there are, the pair is drawn once a frame.
let isAwaited = false;

function drawPairSoon() {
  if (isAwaited) return;
  isAwaited = true;
  requestAnimationFrame(() => {
    isAwaited = false;
    drawPair();
  });
}

// --- choosing ------------------------------------------------------------------------------------

const within = (n, count) => Math.min(Math.max(n, 0), count - 1);
const isAt = (pair, { row, column }) => pair !== null && pair.row === row && pair.column === column;

function choose(pair) {
  const kept = { row: within(pair.row, rows), column: within(pair.column, columns) };
  if (isAt(state, kept)) return;
  Object.assign(state, kept);
  drawPairSoon();
}

// Pin the pair that is chosen; pinning it once more takes the pin away.
function togglePin() {
  const { row, column } = state;
  pin(isAt(state.pinned, state) ? null : { row, column });
}

function pin(pair) {
  const isNew = (state.pinned === null) !== (pair === null);
  state.pinned = pair;
  if (isNew) buildReadout(slice(), pair !== null);
  drawPair();
  closeOrphan();
}

function chooseMatrix(matrix) {
  state.matrix = matrix;
  draw();
}

function chooseOutput(output) {
  state.output = within(output, run.slices.length);
  state.matrix = run.matrices.length;
  draw();
}

// --- pointers and keys ---------------------------------------------------------------------------

// The pair under a pointer, or null.
function pairAt(event) {
  const column = Math.floor((event.offsetX - place.left) / place.cell);
  const row = Math.floor((place.top + place.h - event.offsetY) / place.cell);
  const isInside = column >= 0 && row >= 0 && column < columns && row < rows;
  return isInside ? { row, column } : null;
}

// A press on the pair that is chosen already pins it, a press on another one chooses it. A mouse
// has chosen what it points at; a finger has not.
let wasChosen = false;

canvas.addEventListener("pointermove", (event) => {
  const pair = pairAt(event);
  if (pair !== null) choose(pair);
});
canvas.addEventListener("pointerdown", (event) => {
  const pair = pairAt(event);
  wasChosen = pair !== null && isAt(state, pair);
});
canvas.addEventListener("click", (event) => {
  const pair = pairAt(event);
  if (pair === null) return;
  choose(pair);
  if (wasChosen) togglePin();
});
canvas.addEventListener("keydown", (event) => {
  const { row, column } = state;
  const far = event.shiftKey ? 10 : 1;
  const actions = new Map([
    ["ArrowUp", () => choose({ row: row + far, column })],
    ["ArrowDown", () => choose({ row: row - far, column })],
    ["ArrowRight", () => choose({ row, column: column + far })],
    ["ArrowLeft", () => choose({ row, column: column - far })],
    ["Home", () => choose({ row, column: 0 })],
    ["End", () => choose({ row, column: columns - 1 })],
    ["Enter", togglePin],
    [" ", togglePin],
    ["Escape", () => pin(null)],
  ]);
  if (!actions.has(event.key)) return;
  event.preventDefault();
  actions.get(event.key)();
});

byId("matrix").addEventListener("change", (event) => chooseMatrix(event.target.selectedIndex));
byId("phases").addEventListener("input", (event) => {
  state.phases = event.target.valueAsNumber - 1;
  draw();
});
byId("output").addEventListener("change", (event) => chooseOutput(event.target.selectedIndex));
byId("previous").addEventListener("click", () => chooseOutput(state.output - 1));
byId("next").addEventListener("click", () => chooseOutput(state.output + 1));
for (const side of ["row", "column"])
  byId(side).addEventListener("change", (event) => {
    choose({ row: state.row, column: state.column, [side]: event.target.selectedIndex });
  });
byId("pin").addEventListener("click", togglePin);
byId("csv").addEventListener("click", () => {
  const blob = new Blob([csvOf(valuesOf(current()))], { type: "text/csv" });
  download(blob, fileName(nameOf(current()), "csv"));
});
byId("png").addEventListener("click", () => {
  const name = nameOf(current());
  pictureOf(drawing, name).toBlob((blob) => download(blob, fileName(name, "png")), "image/png");
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
new ResizeObserver(() => {
  if (canvas.parentElement.clientWidth !== drawnWidth) drawAgain();
}).observe(canvas.parentElement);

// --- once ----------------------------------------------------------------------------------------

function fillSubtitle() {
  const about = new Map(run.provenance);
  const said = [document.createTextNode(`${rows} × ${columns} checkpoints`)];
  if (about.has("metric")) said.push(term("metric", about.get("metric")));
  if (run.guarantee !== null) said.push(term(...run.guarantee));
  if (about.has("dtype")) said.push(term("dtype", about.get("dtype")));
  byId("subtitle").append(...said.flatMap((part) => [" · ", part]).slice(1));
}

function fillCaveats() {
  byId("caveats").hidden = run.caveats.length === 0;
  for (const caveat of run.caveats) {
    const line = element("p");
    line.append(term("caveats", "Caveat"), `: ${caveat}`);
    byId("caveats").append(line);
  }
}

function fillModels() {
  for (const side of run.oneSet ? "a" : "ab") {
    const wrapper = element("div", null, { class: "scroll" });
    wrapper.append(element("table"));
    fillTable(wrapper.firstChild, run.models[side], true);
    byId("models").append(wrapper);
  }
}

byId("title").textContent = run.title;
byId("findings").textContent = run.findings.join(" ");
fillSubtitle();
fillCaveats();
fillModels();
const said = run.provenance.map(([name, value]) => [words(name), value]);
fillTable(byId("provenance"), said, false);
const names = run.matrices.map((packed) => words(packed.name));
fillSelect(byId("matrix"), run.slices.length ? [...names, "slices"] : names);
fillSelect(byId("row"), run.rows);
fillSelect(byId("column"), run.columns);
fillSelect(byId("output"), run.slices.map((packed) => packed.name));
state.matrix = Math.max(run.matrices.findIndex((packed) => packed.name === "similarity"), 0);
if (run.phases.length) {
  state.phases = Math.min(3, run.phases.length) - 1;
  Object.assign(byId("phases"), { max: run.phases.length, value: state.phases + 1 });
}
byId("divisions").hidden = byId("segments").hidden = run.phases.length === 0;
byId("embedding").hidden = run.embedding === null;
byId("outputs").hidden = run.slices.length === 0;
byId("ofParts").hidden = run.parts.length === 0;
buildParts(chooseMatrix);
if (run.embedding) sayShare();
draw();
