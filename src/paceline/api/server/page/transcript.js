// Transcript: the conversation as it is seen. Text from anybody is only ever set as textContent.

import { markOf, storyOf } from "./sources.js";

export class Transcript {
  // `onToken(record, step)`: a token was clicked.
  constructor(place, onToken) {
    this._place = place;
    this._onToken = onToken;
    this._welcome = [...place.children];
    this._spans = new Map(); // token -> its element
    this._current = [];
  }

  clear() {
    this._place.replaceChildren(...this._welcome);
    this._spans.clear();
    this._current = [];
  }

  // Adds a turn; returns what takes its answers.
  addTurn(text) {
    if (this._place.contains(this._welcome[0])) this._place.replaceChildren();
    const turn = block("article", "turn");
    const asked = block("section", "asked");
    asked.append(block("h3", "", "You"), block("p", "text", text));
    const answers = block("div", "answers");
    const verdict = block("p", "verdict");
    turn.append(asked, answers, verdict);
    this._place.append(turn);
    this._toEnd(true);
    return {
      remove: () => {
        turn.remove();
        if (!this._place.children.length) this.clear();
      },
      addAnswer: (record, title) => this._addAnswer(answers, record, title),
      setVerdict: (words) => {
        const wasAtEnd = this._isAtEnd();
        verdict.textContent = words;
        this._toEnd(wasAtEnd);
      },
    };
  }

  _addAnswer(answers, record, title) {
    const answer = block("section", "answer");
    const text = block("p", "text");
    const note = block("p", "note");
    const wasAtEnd = this._isAtEnd();
    answer.append(block("h3", "", title), text, note);
    answers.append(answer);
    answers.classList.toggle("pair", answers.children.length > 1);
    this._toEnd(wasAtEnd);
    text.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) this._onToken(record, Number(token.dataset.step));
    });
    return {
      addTokens: (tokens) => {
        const wasAtEnd = this._isAtEnd();
        for (const token of tokens) this._addToken(text, token);
        this._toEnd(wasAtEnd);
      },
      setNote: (words) => {
        const wasAtEnd = this._isAtEnd();
        note.textContent = words;
        this._toEnd(wasAtEnd);
      },
    };
  }

  _addToken(text, token) {
    const known = this._spans.get(token);
    if (known) {
      known.textContent = token.text; // the rest of the text went to the last token
      return;
    }
    const span = block("span", "token", token.text);
    span.dataset.mark = markOf(token.source);
    span.dataset.source = token.source;
    span.dataset.step = token.step;
    const when = token.step < 0 ? "from the prompt's pass" : `step ${token.step + 1}`;
    span.title = `${storyOf(token.source)}, ${when}`;
    if (!token.text) span.classList.add("silent");
    this._spans.set(token, span);
    text.append(span);
  }

  // Marks the tokens of the step that is looked at.
  mark(tokens) {
    for (const span of this._current) span.classList.remove("current");
    this._current = tokens.map((token) => this._spans.get(token)).filter(Boolean);
    for (const span of this._current) span.classList.add("current");
  }

  // Who has scrolled up reads, and is left there.
  _isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this._place;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  _toEnd(isWanted) {
    if (isWanted) this._place.scrollTop = this._place.scrollHeight;
  }
}

function block(name, kind, text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}
