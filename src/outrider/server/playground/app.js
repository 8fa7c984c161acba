// The playground: connects to the server, and shows the chat or the lab.

import { ask, byId, call, disconnect, say, state } from "./api.js";
import { showBeliefs, showRecording } from "./beliefs.js";
import * as chat from "./chat.js";
import * as lab from "./lab.js";

const BEAT_MS = 3000;
const VIEWS = { chat, lab };
const USUAL = { chat: { max_tokens: 1024, seed: "" }, lab: { max_tokens: 128, seed: "1" } };
const VIEW_KEY = "outrider-view";
let view = null;

function show(name) {
  view = name;
  for (const each of Object.keys(VIEWS)) {
    byId(each).hidden = each !== name;
    byId(`to-${each}`).setAttribute("aria-pressed", String(each === name));
  }
  byId("options").open = name === "lab" && innerWidth > 640;
  for (const [field, value] of Object.entries(USUAL[name])) {
    const most = Number(byId(field).max) || Infinity;
    if (byId(field).dataset.own) continue; // what the user gave stays
    byId(field).value = typeof value === "number" ? Math.min(value, most) : value;
  }
  if (name === "chat") byId("ask").focus();
}

function chosen() {
  try {
    return localStorage.getItem(VIEW_KEY);
  } catch {
    return null;
  }
}

function choose(name) {
  show(name);
  try {
    localStorage.setItem(VIEW_KEY, name);
  } catch {
    // it is not remembered
  }
}

async function connect() {
  try {
    const [models, speculation] = await Promise.all([ask("v1/models"), ask("v1/speculation")]);
    const model = models.data[0];
    byId("model").textContent = `${model.id} · context ${model.max_model_len} tokens`;
    byId("max_tokens").max = model.max_model_len;
    for (const [name, value] of Object.entries(model.sampling ?? {})) {
      const field = byId(name);
      if (field && !field.dataset.own) field.value = value;
    }
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
        ? (state.gone ? "The server is back." : "") : "Speculation is switched off on this server.",
    );
    if (view === null) show(chosen() ?? (model.chats ? "chat" : "lab"));
    state.connected = true;
    state.gone = false;
  } catch (error) {
    if (view === null) show("lab");
    disconnect();
    say(error.message, true);
    view = byId("key-label").hidden ? view : null; // the model will say what to show
  }
}

// Notices when the server goes away or comes back.
async function beat() {
  if (document.hidden) return;
  if (state.connected) await call("health").catch(() => {}); // call() reports it
  else if (byId("key-label").hidden || byId("key").value) await connect();
}

for (const name of Object.keys(VIEWS)) {
  VIEWS[name].begin();
  byId(`to-${name}`).addEventListener("click", () => choose(name));
}
for (const field of byId("options").querySelectorAll("input")) {
  field.addEventListener("input", () => { field.dataset.own = "1"; });
}
byId("key").addEventListener("change", connect);
document.addEventListener("keydown", (event) => VIEWS[view ?? "lab"].pressed(event));
connect();
setInterval(beat, BEAT_MS);
