// The page: reads the form, has answers made, one after the other, and keeps the conversation.

import { Failure, serverInfo, streamAnswer } from "./api.js";
import { comparison, summary } from "./words.js";
import { Panel } from "./panel.js";
import { Record } from "./record.js";
import { Transcript } from "./transcript.js";

const NONE = "none";
const TICK_MS = 100; // drawing costs time, and often the model computes on the same machine
const $ = (id) => document.getElementById(id);

const messages = []; // the conversation, as the server gets it
const records = []; // of all answers
let running = null; // AbortController of the answer in the making

const panel = new Panel((record, step) => {
  transcript.mark(record ? record.tokens.filter((token) => token.step === step) : []);
});
const transcript = new Transcript($("transcript"), (record, step) => {
  lookAt(record);
  panel.lookAt(step);
});

function lookAt(record) {
  $("shown").value = records.indexOf(record);
  if (panel.record !== record) panel.show(record);
}

function listAnswers() {
  const options = records.map((record, i) => new Option(`${i + 1}: ${record.drafter}`, i));
  $("shown").replaceChildren(...(options.length ? options : [new Option("none yet")]));
  $("shown").disabled = !options.length;
}

// Nothing came of an answer: it is not there to be looked at.
function forget(record) {
  records.splice(records.indexOf(record), 1);
  listAnswers();
  panel.show(records[records.length - 1] ?? null);
  if (panel.record) lookAt(panel.record);
}

function showError(error) {
  if (!(error instanceof Failure)) console.error(error);
  const what = error instanceof Failure ? error.message : `The page failed: ${error.message}.`;
  $("error").textContent = what;
  $("error").hidden = false;
  $("status").textContent = "";
}

function hideError() {
  $("error").hidden = true;
  $("error").textContent = "";
}

// A number field's value; undefined where it is left empty.
function numberOf(id) {
  const field = $(id);
  if (field.validity.badInput) {
    const name = field.labels[0].textContent;
    throw new Failure(`${name}: what is written there is no number; write one, or leave it empty.`);
  }
  return field.value === "" ? undefined : Number(field.value);
}

function askedFor() {
  const seed = numberOf("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const drafters = [$("drafter").value];
  if ($("compare").checked) drafters.push($("other").value);
  return { temperature: numberOf("temperature"), max_tokens: numberOf("max-tokens"), seed, drafters };
}

async function send(event) {
  event?.preventDefault();
  const prompt = $("prompt").value;
  if (running || !prompt.trim()) return;
  hideError();
  let turn = null;
  const made = [];
  try {
    const asked = askedFor();
    running = new AbortController();
    setBusy(true);
    turn = transcript.addTurn(prompt);
    messages.push({ role: "user", content: prompt });
    $("prompt").value = "";
    // One after the other, so that each has the machine to itself and their speeds can be compared.
    for (const drafter of asked.drafters) {
      if (running.signal.aborted) break;
      await answer(turn, drafter, asked, made);
    }
    if (asked.drafters.length > 1) {
      turn.setVerdict(comparison(made));
      lookAt(made[0]);
    }
    $("status").textContent = running.signal.aborted ? "Stopped." : "The answer is whole.";
  } catch (error) {
    showError(error);
    if (turn && !made.some((record) => record.text)) {
      turn.remove(); // nothing was answered: the message can be sent again
      made.forEach(forget);
      $("prompt").value ||= prompt;
    }
  } finally {
    const reply = made[0]?.reply;
    if (reply) messages.push({ role: "assistant", content: reply });
    else if (turn) messages.pop(); // an unanswered message would be answered with the next one
    running = null;
    setBusy(false);
    panel.draw();
  }
}

async function answer(turn, drafter, asked, made) {
  const { drafters, ...sampling } = asked;
  const record = new Record(drafter, asked.seed);
  const shown = turn.addAnswer(record, titleOf(drafter));
  made.push(record);
  records.push(record);
  listAnswers();
  $("follow").checked = true;
  $("status").textContent = `Answering (${titleOf(drafter)})…`;
  panel.show(record);
  lookAt(record);
  const body = {
    ...sampling,
    messages,
    stream: true,
    speculative: drafter ? { method: drafter } : undefined, // unknown: what the server has
    paceline: { sources: true, tree: true },
  };
  const fresh = [];
  const draw = () => {
    shown.addTokens(fresh.splice(0));
    if (panel.record === record) panel.draw();
  };
  const ticking = setInterval(draw, TICK_MS);
  try {
    record.isWhole = await streamAnswer(body, $("key").value, running.signal, (chunk) => {
      record.timings = chunk.timings ?? record.timings;
      const choice = chunk.choices[0];
      if (choice) fresh.push(...record.take(choice, performance.now()));
    });
  } finally {
    clearInterval(ticking);
    fresh.push(...record.end());
    draw();
    shown.setNote(summary(record));
  }
}

function titleOf(drafter) {
  return drafter === NONE ? "without a drafter" : `with ${drafter || "the server's drafter"}`;
}

function setBusy(isBusy) {
  const [pressed, next] = isBusy ? ["send", "stop"] : ["stop", "send"];
  const hadFocus = document.activeElement === $(pressed);
  $("transcript").setAttribute("aria-busy", isBusy);
  $("send").disabled = isBusy;
  $("stop").disabled = !isBusy;
  $("clear").disabled = isBusy;
  if (hadFocus) $(next).focus(); // a button that is disabled would lose it
}

function clear() {
  messages.length = 0;
  records.length = 0;
  transcript.clear();
  listAnswers();
  panel.show(null);
  hideError();
  $("status").textContent = "The conversation was cleared.";
  $("prompt").focus();
}

function stop() {
  running?.abort();
}

async function begin() {
  $("ask").addEventListener("submit", send);
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", clear);
  $("shown").addEventListener("change", () => panel.show(records[Number($("shown").value)]));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running && stop());
  try {
    const info = await serverInfo();
    const loaded = info.drafter.name;
    for (const name of new Set([loaded, ...info.drafter.parts, NONE])) {
      $("drafter").append(new Option(name, name));
      $("other").append(new Option(name, name));
    }
    $("other").value = NONE;
    for (const id of ["compare", "other"]) $(id).disabled = loaded === NONE;
    const model = info.served_model_name[0] ?? info.model;
    const hint = loaded === NONE ? ": start the server with --spec to see speculation" : "";
    const size = `texts of up to ${info.max_model_len} tokens`;
    $("served").textContent = `${model}, ${titleOf(loaded)}${hint}; ${size}`;
    document.body.dataset.ready = "true";
  } catch (error) {
    $("served").textContent = "";
    showError(error);
  }
}

begin();
