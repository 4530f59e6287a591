// The run: its matrices, unpacked when they are first looked at; numbers as text and as colours.
"use strict";

const byId = (id) => document.getElementById(id);
const run = JSON.parse(byId("run").textContent);
const rows = run.rows.length;
const columns = run.columns.length;
const PALETTE = run.palette;
const RISING = [
  "#440154", "#482878", "#3e4989", "#31688e", "#26828e",
  "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
];
const DIVERGING = [
  "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7",
  "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
];
const NOT_FINITE = [128, 128, 128];

const paletteAt = (n) => PALETTE[n % PALETTE.length];
const words = (name) => name.replaceAll("_", " ");
const signed = (x) => String(x).replace("-", "−");
// A number that rounds to zero has no sign: adding 0 makes 0 of -0.
const rounded = (x, decimals) => signed((+x.toFixed(decimals) + 0).toFixed(decimals));
const shown = (x, decimals) => (Number.isFinite(x) ? rounded(x, decimals) : "not finite");

// A label of at most 20 letters: names of checkpoints differ at their ends more than elsewhere.
function shortened(label) {
  const text = String(label);
  return text.length > 20 ? `${text.slice(0, 8)}…${text.slice(-11)}` : text;
}

// --- matrices ------------------------------------------------------------------------------------

// Whole multiples of a power of ten become numbers; of a symmetric matrix the lower triangle is
// kept, so that entry (i, j), i >= j, stands at i (i + 1) / 2 + j.
function unpack(packed) {
  const scale = 10 ** packed.decimals;
  const kept = packed.values.map((x) => (x === null ? NaN : x / scale));
  const values = new Float64Array(rows * columns);
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) {
      const high = Math.max(i, j);
      const low = Math.min(i, j);
      const n = packed.symmetric ? (high * (high + 1)) / 2 + low : i * columns + j;
      values[i * columns + j] = kept[n];
    }
  return values;
}

const unpacked = new Map();

function valuesOf(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
}

// --- colours -------------------------------------------------------------------------------------

// What the page was told of a scale, as a range: where a value stands between 0 and 1, and back.
// Similarities that crowd near 1 have colours by their angle or by the logarithm of 1 - s.
function rangeOf({ name, low, high, least, diverging }) {
  const stops = diverging ? DIVERGING : RISING;
  if (name === "linear") {
    const end = high > low ? high : low + 1;
    return { low, high: end, stops, at: (x) => (x - low) / (end - low) };
  }
  const isLog = name === "log";
  const by = (x) => (isLog ? -Math.log10(Math.max(1 - x, least)) : -Math.acos(Math.min(x, 1)));
  const [first, last] = [by(low), by(1)];
  const at = (x) => (last > first ? (by(x) - first) / (last - first) : 1);
  const back = (u) => {
    const y = first + u * (last - first);
    return isLog ? 1 - 10 ** -y : Math.cos(y);
  };
  return { stops, at, back, said: isLog ? "log(1 − s)" : "angle" };
}

// The colour of a value.
function colourAt(x, range) {
  if (!Number.isFinite(x)) return NOT_FINITE;
  return ramps.get(range.stops)[Math.min(Math.max(Math.round(255 * range.at(x)), 0), 255)];
}

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

// 256 colours between the stops.
function ramp(stops) {
  const ends = stops.map(channels);
  return Array.from({ length: 256 }, (_, n) => {
    const at = (n / 255) * (stops.length - 1);
    const stop = Math.min(Math.floor(at), stops.length - 2);
    const part = at - stop;
    return ends[stop].map((x, c) => Math.round(x * (1 - part) + ends[stop + 1][c] * part));
  });
}

const ramps = new Map([RISING, DIVERGING].map((stops) => [stops, ramp(stops)]));

// An image of one pixel a pair, the first row at the bottom.
function painted(values, range) {
  const image = new ImageData(columns, rows);
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) {
      const [red, green, blue] = colourAt(values[i * columns + j], range);
      const at = 4 * ((rows - 1 - i) * columns + j);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  const picture = document.createElement("canvas");
  picture.width = columns;
  picture.height = rows;
  picture.getContext("2d").putImageData(image, 0, 0);
  return picture;
}

// Five or so round numbers between the two.
function roundNumbers(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((x) => x * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++)
    ticks.push(+(n * step).toPrecision(12));
  return ticks;
}
