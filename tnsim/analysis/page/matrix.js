// The matrix: curves above it, labels beside and below it, a colour bar to the right.

const LABEL = 130; // most pixels that a label takes
const CELL = 90; // most pixels that a pair takes
const STRIP = 70; // pixels of a strip of curves
const STRIPS = 4;
const FONT = "11px system-ui, sans-serif";

// Curves whose names end in one word, as train_loss and validation_loss, share a strip;
// numbers after it do not count, as in frequency_5 and frequency_24.
function strips() {
  const groups = new Map();
  for (const curve of run.curves) {
    const unit = curve.name.replace(/(_\d+)+$/, "").split("_").at(-1);
    if (!groups.has(unit)) groups.set(unit, []);
    groups.get(unit).push(curve);
  }
  return [...groups.values()].slice(0, STRIPS);
}

// Where everything stands in so many pixels, below `top`.
function layout(brush, width, top) {
  brush.font = FONT;
  const widest = (labels) => {
    const lengths = labels.map((label) => brush.measureText(shortened(label)).width);
    return Math.min(Math.max(...lengths), LABEL) + 10;
  };
  const left = Math.max(widest(run.rows), 34);
  const right = 84;
  const cell = Math.min((width - left - right) / columns, 640 / rows, CELL);
  const above = top + 6 + STRIP * strips().length;
  const [w, h] = [cell * columns, cell * rows];
  const whole = { width: left + w + right, height: above + h + widest(run.columns) };
  return { left, top: above, cell, w, h, ...whole };
}

function drawLabels(brush, { left, top, cell, w, h }) {
  const every = Math.ceil(15 / cell);
  brush.textBaseline = "middle";
  brush.textAlign = "right";
  for (let i = 0; i < rows; i += every)
    brush.fillText(shortened(run.rows[i]), left - 6, top + h - (i + 0.5) * cell, LABEL);
  for (let j = 0; j < columns; j += every) {
    brush.save();
    brush.translate(left + (j + 0.5) * cell, top + h + 6);
    brush.rotate(-Math.PI / 2);
    brush.fillText(shortened(run.columns[j]), 0, 0, LABEL);
    brush.restore();
  }
}

function drawChangePoints(brush, { left, top, cell, w, h }, points) {
  for (const [colour, thick] of [["#fff", 2.6], ["#000", 1.1]]) {
    brush.strokeStyle = colour;
    brush.lineWidth = thick;
    brush.beginPath();
    for (const p of points) {
      brush.moveTo(left, top + h - p * cell);
      brush.lineTo(left + w, top + h - p * cell);
      brush.moveTo(left + p * cell, top);
      brush.lineTo(left + p * cell, top + h);
    }
    brush.stroke();
  }
}

function drawColourBar(brush, { left, top, w, h }, range, ink) {
  const bar = brush.createLinearGradient(0, top + h, 0, top);
  range.stops.forEach((colour, n) => bar.addColorStop(n / (range.stops.length - 1), colour));
  brush.fillStyle = bar;
  brush.fillRect(left + w + 14, top, 11, h);
  brush.fillStyle = ink;
  brush.textAlign = "left";
  brush.textBaseline = "middle";
  const write = (text, at) => {
    const y = top + h * (1 - at);
    brush.fillText(text, left + w + 29, Math.min(Math.max(y, top + 6), top + h - 6), 54);
  };
  if (range.said) {
    // Two digits of what a similarity lacks to 1; the scale is said beside the bar.
    const text = (v) => {
      if (v > 1 - 1e-12) return "1";
      const digits = 1 - Math.floor(Math.log10(1 - v));
      return digits <= 6 ? v.toFixed(digits) : `1−${signed((1 - v).toExponential(0))}`;
    };
    const count = Math.max(Math.min(4, Math.floor(h / 40)), 1);
    for (let n = 0; n <= count; n++) write(text(range.back(n / count)), n / count);
    brush.save();
    brush.translate(left + w + 7, top + h);
    brush.rotate(-Math.PI / 2);
    brush.fillText(`colours by ${range.said}`, 0, 0, h);
    brush.restore();
    return;
  }
  for (const v of roundNumbers(range.low, range.high)) write(signed(v), range.at(v));
}

// One strip: its curves over the columns of the matrix, their names above them.
function drawStrip(brush, { left, cell, w }, curves, bottom, ink) {
  const values = curves.flatMap((curve) => curve.values).filter((x) => x !== null);
  const low = Math.min(...values, 0);
  const most = Math.max(...values);
  const high = most > low ? most : low + 1;
  const height = STRIP - 34;
  const y = (v) => bottom - 12 - (height * (v - low)) / (high - low);
  brush.font = FONT;
  brush.fillStyle = ink;
  brush.textBaseline = "middle";
  brush.textAlign = "right";
  for (const v of [low, high]) brush.fillText(signed(+v.toPrecision(3)), left - 6, y(v), LABEL);
  brush.textAlign = "left";
  const room = w / curves.length;
  curves.forEach((curve, n) => {
    brush.fillStyle = paletteAt(n);
    brush.fillRect(left + n * room, bottom - STRIP + 8, 12, 3);
    brush.fillStyle = ink;
    const name = shortened(words(curve.name));
    brush.fillText(name, left + n * room + 17, bottom - STRIP + 9.5, room - 20);
    brush.strokeStyle = paletteAt(n);
    brush.lineWidth = 1.8;
    brush.beginPath();
    let joined = false;
    curve.values.forEach((v, j) => {
      const x = left + (j + 0.5) * cell;
      if (v !== null && joined) brush.lineTo(x, y(v));
      else if (v !== null) brush.moveTo(x, y(v));
      joined = v !== null;
    });
    brush.stroke();
  });
}

// Draw all of it where `layout` has placed it.
function drawMatrix(brush, place, { picture, range, points, ink }) {
  const { left, top, w, h } = place;
  brush.font = FONT;
  brush.imageSmoothingEnabled = false;
  brush.drawImage(picture, left, top, w, h);
  brush.fillStyle = ink;
  drawLabels(brush, place);
  drawChangePoints(brush, place, points);
  drawColourBar(brush, place, range, ink);
  const all = strips();
  all.forEach((curves, n) => {
    drawStrip(brush, place, curves, top - STRIP * (all.length - 1 - n), ink);
  });
}

// A canvas of so many CSS pixels, sharp on screens of a higher resolution.
function resized(canvas, width, height, ratio) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const brush = canvas.getContext("2d");
  brush.setTransform(ratio, 0, 0, ratio, 0, 0);
  return brush;
}
