// Panel: what speculation did for one answer: its figures, the tree of a step with a scrubber over all
// steps, the histogram. Shows a record that may still grow.

import { showLegend } from "./sources.js";
import { drawTree, inWords } from "./treeview.js";

const $ = (id) => document.getElementById(id);

export class Panel {
  // `onStep(record, step)`: the step that is looked at has changed.
  constructor(onStep) {
    this._onStep = onStep;
    this._record = null;
    this._step = -1;
    this._drawn = null; // what the tree shows
    this._frame = 0;
    $("step").addEventListener("input", () => this.lookAt(Number($("step").value) - 1));
    $("earlier").addEventListener("click", () => this.lookAt(this._step - 1));
    $("later").addEventListener("click", () => this.lookAt(this._step + 1));
    $("follow").addEventListener("change", () => this.refresh());
    showLegend($("legend"), new Map());
  }

  show(record) {
    this._record = record;
    this._step = record ? record.steps.length - 1 : -1;
    this.refresh();
  }

  get record() {
    return this._record;
  }

  // Looks at one step; from then on the newest is not followed.
  lookAt(step) {
    if (!this._record || step < 0 || step >= this._record.steps.length) return;
    this._step = step;
    $("follow").checked = false;
    this.refresh();
  }

  // What is looked at has changed. A record that grows is drawn by whoever lets it grow, `draw`.
  refresh() {
    this._frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    const record = this._record;
    const last = record ? record.steps.length - 1 : -1;
    if ($("follow").checked || this._step < 0) this._step = last;
    showLegend($("legend"), record?.countBySource ?? new Map());
    this._drawFigures(record);
    this._drawHistogram(record?.histogram ?? []);
    this._drawScrubber(last);
    this._drawTree(record);
  }

  _drawFigures(record) {
    const count = record?.tokens.length ?? 0;
    const drafted = record ? count - (record.countBySource.get("target") ?? 0) : 0;
    $("rate-name").textContent = record?.isWhole ? "Tokens per second" : "Tokens per second now";
    $("rate").textContent = rateShown(record);
    $("accept-length").textContent = record?.acceptLength?.toFixed(2) ?? "–";
    $("num-steps").textContent = record ? record.steps.length : "–";
    $("drafted").textContent = count ? `${drafted} of ${count}` : "–";
  }

  _drawHistogram(histogram) {
    const most = Math.max(1, ...histogram);
    const rows = histogram.slice(1).map((steps, i) => {
      const row = document.createElement("li");
      const name = document.createElement("span");
      name.textContent = i ? `${i + 1} tokens` : "1 token";
      const bar = document.createElement("span");
      bar.className = "bar";
      bar.style.width = `${(100 * steps) / most}%`;
      const value = document.createElement("span");
      value.textContent = steps === 1 ? "1 step" : `${steps} steps`;
      row.append(name, bar, value);
      return row;
    });
    $("histogram").replaceChildren(...rows);
  }

  _drawScrubber(last) {
    const none = last < 0;
    for (const id of ["step", "earlier", "later"]) $(id).disabled = none;
    $("step").max = Math.max(1, last + 1);
    $("step").value = this._step + 1;
    $("step-number").textContent = none ? "–" : `${this._step + 1} of ${last + 1}`;
    $("earlier").disabled = this._step <= 0;
    $("later").disabled = this._step >= last;
  }

  _drawTree(record) {
    const step = record?.steps[this._step] ?? null;
    const tree = step?.tree ?? null;
    const isDrawn = this._drawn?.step === step && this._drawn?.tree === tree;
    if (isDrawn) return;
    this._drawn = { step, tree };
    this._onStep(record, this._step);
    if (tree) {
      drawTree($("tree"), tree);
      $("tree-words").textContent = inWords(tree);
      return;
    }
    $("tree").replaceChildren();
    $("tree-words").textContent = step
      ? "The server does not know this step's tree: it was grown on a GPU and stayed there."
      : "The tree of each step appears here once there is an answer.";
  }
}

// While an answer is made: over the last moments. Afterwards: what the server measured.
function rateShown(record) {
  if (!record) return "–";
  const rate = record.isWhole ? record.timings?.predicted_per_second : record.rate(performance.now());
  return rate ? rate.toFixed(rate < 10 ? 1 : 0) : "–";
}
