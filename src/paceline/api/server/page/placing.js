// Placing: which part of an answer's text belongs to which token.
//
// Text comes when it is certain, so it may lag behind the tokens: half a character has none, an end-of-text
// token never gets any. The text as a whole is exact; where a token's own text does not tell its share, the
// whole piece goes to the first token that it can belong to.

const UNKNOWN = "\uFFFD"; // in a token's text: a piece of a character
const AHEAD = 4; // tokens without text that may stand side by side

export class Placing {
  constructor() {
    this._queue = []; // tokens that wait for their text
    this._text = ""; // text that waits for its token
    this._last = null;
  }

  // Takes more text and tokens; returns the tokens that are settled now, in order, `text` set.
  take(text, tokens, isLast) {
    this._queue.push(...tokens);
    this._text += text;
    const settled = [];
    while (this._queue.length && this._text && this._settleNext(settled, isLast));
    if (isLast) {
      for (const token of this._queue.splice(0)) this._settle(token, "", settled);
      if (this._text && this._last) {
        this._last.text += this._text;
        if (!settled.includes(this._last)) settled.push(this._last);
        this._text = "";
      }
    }
    return settled;
  }

  _settle(token, text, settled) {
    token.text = text;
    this._last = token;
    settled.push(token);
  }

  // Settles at least one token, or returns false: more has to come.
  _settleNext(settled, isLast) {
    const [token] = this._queue;
    if (token.piece.includes(UNKNOWN)) {
      const run = this._queue.findIndex((other) => !other.piece.includes(UNKNOWN));
      const count = run < 0 ? this._queue.length : run;
      const next = run < 0 ? -1 : this._text.indexOf(this._queue[run].piece);
      this._cut(count, next < 0 ? this._text.length : next, settled);
      return true;
    }
    if (token.piece && this._text.startsWith(token.piece)) {
      this._cut(1, token.piece.length, settled);
      return true;
    }
    if (!isLast && token.piece.startsWith(this._text)) return false;
    const ahead = this._queue
      .slice(1, 1 + AHEAD)
      .findIndex((other) => other.piece && this._text.startsWith(other.piece));
    if (ahead >= 0) this._cut(ahead + 1, 0, settled);
    else this._cut(1, this._text.length, settled);
    return true;
  }

  // Gives the first `length` of the text to the first of `count` tokens, nothing to the others.
  _cut(count, length, settled) {
    const text = this._text.slice(0, length);
    this._text = this._text.slice(length);
    this._queue.splice(0, count).forEach((token, i) => this._settle(token, i ? "" : text, settled));
  }
}
