// What the engine believes, and whether it records.

import { ask, byId } from "./api.js";

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
export function showBeliefs(beliefs) {
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
export function showRecording(recording) {
  const told = byId("recording");
  told.hidden = !recording || Boolean(recording.stopped);
  const what = recording?.answers ? "prompts and answers" : "prompts";
  told.textContent = `This server records ${what}, to train drafters on.`;
}

export async function refresh() {
  try {
    const speculation = await ask("v1/speculation");
    showBeliefs(speculation.controller);
    showRecording(speculation.recording);
  } catch {
    // what is under way says what is wrong
  }
}
