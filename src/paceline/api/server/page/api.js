// The server's side: what it serves, answers as streams, and failures as sentences.
//
// Addresses are relative to the page, which may stand behind a proxy under another path.

export class Failure extends Error {}

const addressOf = (path) => new URL(path, document.baseURI);

// What is served; see /server_info.
export async function serverInfo() {
  const response = await reach("server_info", {});
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Streams an answer: calls `onChunk` with each chunk. Resolves to false if `signal` ended it, else to true.
export async function streamAnswer(body, key, signal, onChunk) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const response = await reach("v1/chat/completions", options);
    if (!response.ok) throw await refusal(response);
    await readEvents(response, onChunk);
    return true;
  } catch (error) {
    if (signal.aborted) return false;
    throw error;
  }
}

async function reach(path, options) {
  try {
    return await fetch(addressOf(path), options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure(
      `The server at ${location.host} does not answer: it was stopped, or the network is down. ` +
        "Start it again, then send the message once more.",
    );
  }
}

async function refusal(response) {
  const told = await response.json().then(
    (body) => body?.error?.message,
    () => null,
  );
  const what = sentence(told ?? "it gives no reason");
  if (response.status === 401) {
    return new Failure(`The server wants an API key (401): ${what} The field is under Options.`);
  }
  if (response.status === 503) {
    const wait = response.headers.get("Retry-After");
    const when = wait ? `in ${wait} s` : "in a while";
    return new Failure(`The server takes no request now (503): ${what} Try again ${when}.`);
  }
  const who = response.status < 500 ? "The server refused this" : "The server failed";
  return new Failure(`${who} (${response.status}): ${what}`);
}

function sentence(text) {
  const trimmed = text.trim();
  return /[.!?]$/.test(trimmed) ? trimmed : `${trimmed}.`;
}

// Reads server-sent events until [DONE].
async function readEvents(response, onChunk) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment keeps the connection open
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new Failure(`The answer ended early: ${sentence(chunk.error.message)}`);
      }
      onChunk(chunk);
    }
  }
  throw new Failure(
    "The answer was cut off: the connection to the server ended before it was whole. " +
      "See whether the server still runs, then send the message again.",
  );
}
