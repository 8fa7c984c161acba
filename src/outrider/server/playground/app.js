// The playground: one stream in one lane, or two of the same seed side by side.

const byId = (id) => document.getElementById(id);
const STEPS_SHOWN = 400;
const REFRESH_MS = 1000; // the engine says no oftener what it believes
const BEAT_MS = 3000;
let running = null; // aborts what is under way
let connected = false; // the page shows the server's model
let gone = false; // the server did not answer, and the page says so

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function say(text, bad = false) {
  byId("message").textContent = text;
  byId("message").classList.toggle("bad", bad);
}

// Fetches, and says so if the server is gone; browsers only say "Failed to fetch".
async function call(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : lost();
  }
}

function lost() {
  gone = true;
  disconnect();
  const text = `The server at ${location.host} does not answer. This page keeps trying.`;
  say(text, true);
  return new Error(text);
}

function disconnect() {
  connected = false;
  byId("model").textContent = "not connected";
}

// The error that an answer reports; a proxy before the server may answer without JSON.
async function failure(response) {
  const told = await response.json().catch(() => null);
  return new Error(told?.error?.message ?? `HTTP ${response.status} ${response.statusText}`.trim());
}

async function ask(path) {
  const response = await call(path, { headers: headers() });
  if (response.status === 401) {
    byId("key-label").hidden = false;
    throw new Error("This server wants an API key.");
  }
  if (!response.ok) throw await failure(response);
  return response.json();
}

async function connect() {
  try {
    const [models, speculation] = await Promise.all([ask("/v1/models"), ask("/v1/speculation")]);
    const model = models.data[0];
    byId("model").textContent = `${model.id} · context ${model.max_model_len} tokens`;
    const select = byId("drafter");
    const before = select.value;
    select.replaceChildren();
    const drafters = Object.keys(speculation.drafters).filter((n) => n !== "prediction");
    for (const name of [...(speculation.controller ? ["auto"] : []), ...drafters]) {
      select.add(new Option(name, name, false, name === (before || speculation.drafter)));
    }
    byId("length").max = speculation.max_num_speculative_tokens;
    if (!before) byId("length").value = speculation.num_speculative_tokens ?? "";
    showBeliefs(speculation.controller);
    showRecording(speculation.recording);
    say(
      speculation.enabled
        ? (gone ? "The server is back." : "") : "Speculation is switched off on this server.",
    );
    connected = true;
    gone = false;
  } catch (error) {
    disconnect();
    say(error.message, true);
  }
}

// Notices when the server goes away or comes back.
async function beat() {
  if (document.hidden) return;
  if (connected) await call("/health").catch(() => {}); // call() reports it
  else if (byId("key-label").hidden || byId("key").value) await connect();
}

// One line for all sequences that are drafted for alike.
function choicesOf({ choices, paused }) {
  if (paused) return "Drafting pauses, since it lost time.";
  const counts = new Map();
  for (const { method, depth, sequences } of choices) {
    const how = depth ? `${method}, ${depth} deep` : "plain decoding";
    counts.set(how, (counts.get(how) ?? 0) + sequences);
  }
  const parts = [...counts].map(([how, count]) => (counts.size > 1 ? `${how} (${count})` : how));
  return `Chosen: ${parts.join(" · ") || "nothing yet"}`;
}

// What the engine's controller believes; hidden where the engine is told how to draft.
function showBeliefs(beliefs) {
  byId("beliefs").hidden = !beliefs;
  if (!beliefs) return;
  byId("choices").textContent = choicesOf(beliefs);
  byId("expected-chosen").textContent = beliefs.tokens_per_second.toFixed(0);
  byId("expected-plain").textContent = beliefs.plain_tokens_per_second.toFixed(0);
  const drafting = beliefs.choices.filter((c) => c.depth && !beliefs.paused);
  const chosen = new Set(drafting.map((c) => c.method));
  const rows = Object.entries(beliefs.survival).map(([method, { survival }]) => {
    const row = byId("method").content.cloneNode(true);
    row.querySelector("li").classList.toggle("chosen", chosen.has(method));
    row.querySelector(".name").textContent = method;
    const bars = row.querySelector(".bars");
    const shares = survival.map((share) => `${(100 * share).toFixed(0)} %`);
    bars.setAttribute("aria-label", `${method}: ${shares.join(", ")}`);
    row.querySelector(".share").textContent = shares[0];
    survival.forEach((share, i) => {
      const bar = document.createElement("i");
      bar.style.height = `${100 * share}%`;
      bar.title = `depth ${i + 1}: ${shares[i]}`;
      bars.append(bar);
    });
    return row;
  });
  byId("survival").replaceChildren(...rows);
}

// Whoever types here is told what is kept of it.
function showRecording(recording) {
  const told = byId("recording");
  told.hidden = !recording || Boolean(recording.stopped);
  const what = recording?.answers ? "prompts and answers" : "prompts";
  told.textContent = `This server records ${what}, to train drafters on.`;
}

async function refresh() {
  try {
    const speculation = await ask("/v1/speculation");
    showBeliefs(speculation.controller);
    showRecording(speculation.recording);
  } catch {
    // what is under way says what is wrong
  }
}

function body(enabled) {
  const chat = document.querySelector("input[name=mode]:checked").value === "chat";
  const prompt = byId("prompt").value;
  const asked = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
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
  if (byId("seed").value) asked.seed = byId("seed").value;
  return [chat ? "/v1/chat/completions" : "/v1/completions", asked];
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

class Lane {
  constructor(title) {
    const found = byId("lane").content.cloneNode(true);
    this.element = found.querySelector("article");
    this.element.querySelector("h2").textContent = title;
    this.steps = found.querySelector(".steps");
    this.output = found.querySelector(".text");
    byId("lanes").append(found);
    this.text = "";
    this.tokens = this.count = this.drafted = this.accepted = 0;
    this.start = performance.now();
    this.first = this.last = null;
  }

  show(name, value) {
    this.element.querySelector(`[data-figure=${name}]`).textContent = value;
  }

  step({ tokens, rejected }) {
    this.last = performance.now();
    this.first ??= this.last;
    this.count += 1;
    this.tokens += tokens.length;
    const stood = tokens.filter((t) => t.origin === "accepted").length;
    this.accepted += stood;
    this.drafted += stood + rejected.length;
    tokens.forEach((token, i) => {
      const span = document.createElement("span");
      span.className = `token ${token.origin}`;
      span.textContent = token.text;
      span.title = token.origin;
      if (i === tokens.length - 1 && rejected.length) {
        span.dataset.rejected = rejected.map((t) => t.text).join("");
        span.tabIndex = 0;
      }
      this.output.append(span);
      this.text += token.text;
    });
    const bar = document.createElement("i");
    bar.style.height = `${Math.min(100, tokens.length * 12)}%`;
    bar.title = `${tokens.length} tokens`;
    this.steps.append(bar);
    if (this.steps.childElementCount > STEPS_SHOWN) this.steps.firstChild.remove();
    this.output.scrollTop = this.output.scrollHeight;
    this.figures();
  }

  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens - 1) / seconds : 0;
  }

  figures() {
    if (this.speed) this.show("speed", this.speed.toFixed(0));
    if (this.drafted) this.show("rate", `${((100 * this.accepted) / this.drafted).toFixed(0)} %`);
    this.show("length", (this.tokens / this.count).toFixed(2));
    this.show("ttft", `${(this.first - this.start).toFixed(0)} ms`);
  }

  async run(enabled, signal) {
    const [path, asked] = body(enabled);
    const response = await call(path, {
      method: "POST", headers: headers(), body: JSON.stringify(asked), signal,
    });
    if (!response.ok) throw await failure(response);
    for await (const chunk of events(response)) {
      const choice = chunk.choices[0];
      if (choice?.speculation) this.step(choice.speculation);
    }
  }
}

async function under(work) {
  if (!byId("form").reportValidity()) return;
  running?.abort();
  const mine = (running = new AbortController());
  byId("lanes").replaceChildren();
  byId("stop").disabled = false;
  say("running …");
  const clock = setInterval(refresh, REFRESH_MS);
  try {
    await work(mine.signal);
  } catch (error) {
    if (running !== mine) return; // another has begun, and says how it goes
    if (error.name === "AbortError") say("stopped");
    else say(error.message, true);
  } finally {
    clearInterval(clock);
    refresh();
    if (running === mine) {
      running = null;
      byId("stop").disabled = true;
    }
  }
}

function run() {
  return under(async (signal) => {
    const lane = new Lane("Speculation on");
    await lane.run(true, signal);
    say(`${lane.tokens} tokens in ${lane.count} steps`);
  });
}

// One after the other, so that neither takes the other's time; with the seed the same text must come.
function race() {
  if (!byId("seed").value) byId("seed").value = String(Math.floor(Math.random() * 2 ** 31));
  return under(async (signal) => {
    const off = new Lane("Speculation off");
    await off.run(false, signal);
    const on = new Lane("Speculation on");
    await on.run(true, signal);
    const faster = off.speed ? ` · ${(on.speed / off.speed).toFixed(2)}x the speed` : "";
    const same = on.text === off.text;
    const proof = same ? `Both texts are equal, all ${on.tokens} tokens` : "The texts differ";
    say(`${proof}${faster}`, !same);
    byId("message").dataset.equal = String(same);
  });
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("race").addEventListener("click", race);
byId("stop").addEventListener("click", () => running?.abort());
byId("key").addEventListener("change", connect);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
  if (event.key === "Escape") running?.abort();
});
connect();
setInterval(beat, BEAT_MS);
