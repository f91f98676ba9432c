// Record: all that is known of one answer, without a document: its tokens with their text and source, the
// steps that made them, the trees of those steps, and when tokens came.

import { Placing } from "./placing.js";
import { TARGET } from "./sources.js";

const WINDOW_MS = 2000; // "now" is this long

export class Record {
  constructor(drafter, seed) {
    this.drafter = drafter; // what was asked for
    this.seed = seed;
    this.tokens = []; // { id, piece, source, step, text }; step -1: it came with the prompt's pass
    this.steps = []; // { start, count, tree }; tree null: the server does not know it
    this.text = ""; // all of it, reasoning too
    this.reply = ""; // what the conversation goes on with
    this.reason = null; // why the answer ended, as the server says
    this.timings = null; // the server's own figures, with the end
    this.isWhole = false;
    this._placing = new Placing();
    this._arrivals = []; // { at, count }
    this._stepIsOpen = false;
  }

  // Takes a choice of a chunk; returns the tokens whose text became known with it.
  take(choice, now) {
    const told = choice.paceline ?? { sources: [], tokens: [], token_ids: [] };
    const fresh = told.tokens.map((piece, i) =>
      this._token(told.token_ids[i], piece, told.sources[i]),
    );
    for (const tree of told.trees ?? []) {
      const step = this.steps.findLast((one) => one.start === tree.start);
      if (step) step.tree = tree;
    }
    if (fresh.length) this._arrivals.push({ at: now, count: fresh.length });
    const delta = choice.delta ?? {};
    const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
    this.text += text;
    this.reply += delta.content ?? "";
    if (choice.finish_reason) this.reason = choice.finish_reason;
    return this._placing.take(text, fresh, Boolean(choice.finish_reason));
  }

  // The stream has ended, whatever for: the text of the last tokens.
  end() {
    return this._placing.take("", [], true);
  }

  // Tokens per second over the last moments, or null before there is a span of time to speak of.
  rate(now) {
    while (this._arrivals.length > 1 && this._arrivals[0].at < now - WINDOW_MS) this._arrivals.shift();
    const since = this._arrivals[0]?.at;
    if (since === undefined || now - since < 100) return null;
    const later = this._arrivals.slice(1).reduce((sum, arrival) => sum + arrival.count, 0);
    return (1000 * later) / (now - since);
  }

  // Tokens per verify step, the model's own included.
  get acceptLength() {
    const made = this.steps.reduce((sum, step) => sum + step.count, 0);
    return this.steps.length ? made / this.steps.length : null;
  }

  // Index n: steps that emitted n tokens.
  get histogram() {
    const found = [];
    for (const step of this.steps) {
      while (found.length <= step.count) found.push(0);
      found[step.count] += 1;
    }
    return found;
  }

  get countBySource() {
    const counts = new Map();
    for (const token of this.tokens) counts.set(token.source, (counts.get(token.source) ?? 0) + 1);
    return counts;
  }

  // A step's tokens are accepted drafts and then the target's own; only an answer's last step may lack it.
  _token(id, piece, source) {
    const token = { id, piece, source, step: -1, text: "" };
    if (this.tokens.length) {
      if (!this._stepIsOpen) this.steps.push({ start: this.tokens.length, count: 0, tree: null });
      const step = this.steps[this.steps.length - 1];
      step.count += 1;
      token.step = this.steps.length - 1;
      this._stepIsOpen = source !== TARGET;
    }
    this.tokens.push(token);
    return token;
  }
}
