// The matrix as a file, made in the browser: numbers as CSV, the picture as PNG.

const PICTURE = { width: 900, ratio: 2, title: 30, paper: "#fff", ink: "#1d2126" };

function field(value) {
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "nan";
  return /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : String(value);
}

// Labels in the first line and the first column, as in `similarity.csv` of a run; no spreadsheet
// takes these cells for formulas.
function csvOf(values) {
  const lines = [["", ...run.cells.columns]];
  for (let i = 0; i < rows; i++)
    lines.push([run.cells.rows[i], ...values.slice(i * columns, (i + 1) * columns)]);
  return lines.map((line) => line.map(field).join(",") + "\r\n").join("");
}

// The matrix as on the page, on white whatever the page looks like, under its name.
function pictureOf(drawing, name) {
  const canvas = document.createElement("canvas");
  const { width, ratio, title, paper, ink } = PICTURE;
  const place = layout(canvas.getContext("2d"), width, title);
  const brush = resized(canvas, place.width, place.height + 8, ratio);
  brush.fillStyle = paper;
  brush.fillRect(0, 0, place.width, place.height + 8);
  brush.fillStyle = ink;
  brush.font = "600 14px system-ui, sans-serif";
  brush.textBaseline = "middle";
  brush.fillText(`${run.title}: ${name}`, place.left, title / 2, place.width - place.left);
  drawMatrix(brush, place, { ...drawing, ink });
  return canvas;
}

function fileName(name, ending) {
  const plain = `${run.title} ${name}`.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
  return `${plain.replaceAll(/^-+|-+$/g, "").slice(0, 80) || "matrix"}.${ending}`;
}

function download(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", null, { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
