// What is said under answers: figures of one, and how two of one prompt compare.

const ENDS = {
  stop: "ended by itself",
  length: "reached the most tokens",
  tool_calls: "calls a function",
  abort: "was ended by the server",
};

export function summary(record) {
  const count = record.tokens.length;
  if (!count) return record.isWhole ? "An empty answer." : "No token came.";
  const rate = record.timings?.predicted_per_second;
  const speed = rate ? `, ${rate.toFixed(0)} tokens a second` : "";
  const steps = record.steps.length;
  const per = record.acceptLength ? ` (${record.acceptLength.toFixed(2)} tokens each)` : "";
  const end = record.isWhole ? (ENDS[record.reason] ?? record.reason) : "is not whole";
  return `${count} tokens in ${steps} steps${per}${speed}; seed ${record.seed}; ${end}.`;
}

// Whether two answers to one prompt are the same, token by token, and how their speeds compare.
export function comparison([first, second]) {
  if (!first?.isWhole || !second?.isWhole) return "Not compared: an answer is not whole.";
  const place = first.tokens.findIndex((token, i) => token.id !== second.tokens[i]?.id);
  const sameTokens = place < 0 && first.tokens.length === second.tokens.length;
  const pair = `${first.drafter} and ${second.drafter}`;
  if (!sameTokens || first.text !== second.text) {
    const where = (place < 0 ? Math.min(first.tokens.length, second.tokens.length) : place) + 1;
    return `The texts differ, from token ${where} on (${pair}).`;
  }
  const rates = [first, second].map((record) => record.timings?.predicted_per_second);
  if (!rates[0] || !rates[1]) return `The texts are equal (${pair}).`;
  const factor = (rates[0] / rates[1]).toFixed(2);
  return `The texts are equal; ${first.drafter} made it ${factor} times as fast as ${second.drafter}.`;
}
