// Slices: a stepper over outputs, and the slices around the one that is shown as small pictures.

const TILES = 20;

const rangeOfSlices = run.sliceScale && rangeOf(run.sliceScale);

function makeTile(packed, n, choose) {
  const name = `output ${packed.name}`;
  const button = element("button", null, { type: "button", class: "tile", "aria-label": name });
  button.title = name;
  button.dataset.output = n;
  button.append(painted(valuesOf(packed), rangeOfSlices), element("span", packed.name));
  button.addEventListener("click", () => choose(n));
  return button;
}

let firstTile = null;

function drawTiles(output, isShown, choose) {
  const first = TILES * Math.floor(output / TILES);
  const end = Math.min(first + TILES, run.slices.length);
  if (first !== firstTile) {
    const some = run.slices.slice(first, end);
    byId("tiles").replaceChildren(...some.map((packed, n) => makeTile(packed, first + n, choose)));
    firstTile = first;
  }
  for (const tile of byId("tiles").children)
    tile.setAttribute("aria-pressed", String(isShown && Number(tile.dataset.output) === output));
  byId("output").selectedIndex = output;
  byId("previous").disabled = output === 0;
  byId("next").disabled = output === run.slices.length - 1;
  byId("shown").textContent = "";
  if (run.slices.length > TILES)
    byId("shown").textContent = `${first + 1} to ${end} of ${run.slices.length} outputs`;
}
