// Calls to the server, and what it says of itself while they fail.

export const byId = (id) => document.getElementById(id);
export const state = { connected: false, gone: false }; // the page shows the server's model; it says that the server is gone

export function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export function say(text, bad = false) {
  byId("message").textContent = text;
  byId("message").classList.toggle("bad", bad);
}

// Fetches, and says so if the server is gone; browsers only say "Failed to fetch".
export async function call(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : lost();
  }
}

function lost() {
  state.gone = true;
  disconnect();
  const text = `The server at ${location.host} does not answer. This page keeps trying.`;
  say(text, true);
  return new Error(text);
}

export function disconnect() {
  state.connected = false;
  byId("model").textContent = "not connected";
}

// The error that an answer reports; a proxy before the server may answer without JSON.
export async function failure(response) {
  const told = await response.json().catch(() => null);
  return new Error(told?.error?.message ?? `HTTP ${response.status} ${response.statusText}`.trim());
}

export async function ask(path) {
  const response = await call(path, { headers: headers() });
  if (response.status === 401) {
    byId("key-label").hidden = false;
    byId("options").open = true;
    throw new Error("This server wants an API key.");
  }
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The chunks of a call that is answered as a stream.
export async function* streamed(path, body, signal) {
  const response = await call(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await failure(response);
  yield* events(response);
}

// The JSON of each server-sent event of a response, up to the one that ends it.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost();
    });
    if (done) throw new Error("The answer broke off before its end.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

// The options that both views share, as fields of a call.
export function options(enabled) {
  const asked = {
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: true,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max_tokens").value),
    speculation: {
      enabled,
      drafter: byId("drafter").value || null,
      num_speculative_tokens: byId("length").value ? Number(byId("length").value) : null,
    },
  };
  if (byId("top_p").value) asked.top_p = Number(byId("top_p").value);
  if (byId("seed").value) asked.seed = byId("seed").value;
  return asked;
}

// What the tokens of an answer tell: counts, and times of the first and the last one.
export class Figures {
  constructor() {
    this.tokens = this.count = this.drafted = this.accepted = 0;
    this.start = performance.now();
    this.first = this.last = null;
  }

  step({ tokens, rejected }) {
    this.last = performance.now();
    this.first ??= this.last;
    this.count += 1;
    this.tokens += tokens.length;
    const stood = tokens.filter((t) => t.origin === "accepted").length;
    this.accepted += stood;
    this.drafted += stood + rejected.length;
  }

  // Tokens a second from the first step to the last. Steps that came in one packet share a time:
  // then the whole wait counts.
  get speed() {
    if (this.count < 2) return 0;
    if (this.last > this.first) return (1000 * (this.tokens - 1)) / (this.last - this.first);
    return this.last > this.start ? (1000 * this.tokens) / (this.last - this.start) : 0;
  }

  // The figures in words, by name; of those that there are.
  get told() {
    return {
      ...(this.speed ? { speed: this.speed.toFixed(0) } : {}),
      ...(this.drafted ? { rate: `${((100 * this.accepted) / this.drafted).toFixed(0)} %` } : {}),
      length: (this.tokens / this.count).toFixed(2),
      ttft: `${(this.first - this.start).toFixed(0)} ms`,
    };
  }
}

// The elements of a step's tokens, coloured by origin.
export function coloured({ tokens, rejected }) {
  return tokens.map((token, i) => {
    const span = document.createElement("span");
    span.className = `token ${token.origin}`;
    span.textContent = token.text;
    span.title = token.origin;
    if (i === tokens.length - 1 && rejected.length) {
      span.dataset.rejected = rejected.map((t) => t.text).join("");
      span.tabIndex = 0;
    }
    return span;
  });
}
