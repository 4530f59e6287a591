// Terms, explained where they stand: a term is a button, and pressing it opens a note below.

const TERMS = new Map(Object.entries({
  similarity:
    "The cosine of two models as functions, ⟨a|b⟩ / √(⟨a|a⟩⟨b|b⟩), computed from their weights: " +
    "1 for equal functions (whatever a positive factor), 0 for unrelated ones, −1 for opposite " +
    "ones.",
  log_inner:
    "The natural logarithm of the size of the inner product ⟨a|b⟩, which itself may be larger or " +
    "smaller than a floating-point number can be: ⟨a|b⟩ = sign · exp(log inner).",
  sign: "The sign of the inner product ⟨a|b⟩: 1, −1, or 0 where it vanishes.",
  standard_error:
    "The standard error of a similarity that was estimated over a sample of inputs, as an " +
    "estimate for the distribution they come from.",
  weight_cosine:
    "The cosine of all weights as one long vector. Unlike the similarity it changes when hidden " +
    "units are permuted or rescaled, although the function stays the same.",
  slices:
    "The similarity of one output coordinate alone. A slice shows which outputs two models " +
    "share; all slices here have one colour scale.",
  parts:
    "Pieces of a transformer that are models of their own, such as the scores (qk) or the values " +
    "(ov) of a head. A cell has the value of the chosen pair in the matrix of its part; press it " +
    "to open the matrix.",
  metric:
    "The inner product of functions under which models are compared: for gaussian the " +
    "expectation of their product over Gaussian inputs; its parameters stand under Provenance.",
  exact:
    "The numbers meet the definition of the metric up to rounding. A metric of given inputs, as " +
    "empirical, is exact for these.",
  "on these inputs":
    "The numbers are exact for the inputs that were given. Standard errors say how much they " +
    "would change for others of the kind.",
  estimates:
    "The numbers are means over inputs that were drawn. Standard errors say how far they are " +
    "from the definition of the metric.",
  "an approximation":
    "The numbers approximate the definition of the metric, as the Gaussian closure does beyond " +
    "one nonlinear layer.",
  dtype: "The floating-point numbers of the computation; float64 holds about 16 digits.",
  caveats:
    "What makes a model of this run another function than its file holds, for example a norm " +
    "that was left out. It was said when the file was read.",
  trajectories:
    "Lines through the matrix: the similarity of every checkpoint to the last one, to the one " +
    "before it, and to the column of the pair that is chosen.",
  embedding:
    "Checkpoints as points of a plane, placed so that distances are as near as possible to the " +
    "chords √(2 − 2 cos) of their similarities (classical multidimensional scaling). The line " +
    "joins those of a run in order.",
  chords:
    "The distance of two models as unit vectors, √(2 − 2 cos): 0 for equal functions, √2 for " +
    "unrelated ones, 2 for opposite ones.",
  phases:
    "A division of the run into contiguous ranges, the best of all with this many: each model is " +
    "as near as possible to the mean of its phase. Lines in the matrix show it.",
  scatter:
    "The sum of squared distances of the models, as unit vectors, from the mean of their phase. " +
    "It falls with every further phase; a sharp bend says how many there are.",
  block_score:
    "Δ, the mean of the matrix over pairs of different models within a phase, minus the mean " +
    "over pairs across phases. Higher is a sharper division; 0 is none.",
  mean_within: "The mean of the matrix over pairs of different models of this phase.",
  difference: "The value of the pair minus the value of the pinned pair.",
  log_norm:
    "The natural logarithm of the squared norm ⟨a|a⟩ of a model as a function: its inner product " +
    "with itself.",
  hash: "A digest of the weights: models with equal ones are the same, and are computed once.",
}));

const isTerm = (name) => TERMS.has(name) || Object.hasOwn(run.about, name);

// A word of the page or the name of a matrix: a button where it can be explained, else text.
function term(name, text) {
  if (!isTerm(name)) return document.createTextNode(text);
  return element("button", text, { type: "button", class: "term", "data-term": name });
}

function meaning(name) {
  const about = Object.hasOwn(run.about, name) ? run.about[name] : [];
  const details = about.map(([key, value]) => `${words(key)}: ${value}`);
  return [TERMS.get(name), ...details].filter(Boolean).join(" · ");
}

let opened = null;

function closeNote() {
  if (opened === null) return;
  opened.note.remove();
  opened.button.removeAttribute("aria-controls");
  opened.button.setAttribute("aria-expanded", "false");
  opened = null;
}

// A note goes with its button, where that was replaced.
function closeOrphan() {
  if (opened !== null && !opened.button.isConnected) closeNote();
}

function toggleNote(button) {
  const isOpen = opened !== null && opened.button === button;
  closeNote();
  if (isOpen) return;
  const note = element("div", meaning(button.dataset.term), {
    id: "note", class: "note", role: "status",
  });
  button.closest(".scroll, h2, p, .caveats").after(note);
  button.setAttribute("aria-controls", "note");
  button.setAttribute("aria-expanded", "true");
  opened = { button, note };
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".term");
  if (button !== null) toggleNote(button);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeNote();
});
