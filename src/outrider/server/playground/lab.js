// The lab: one stream in one lane, or two of the same seed side by side.

import { Figures, byId, coloured, options, say, streamed } from "./api.js";
import { refresh } from "./beliefs.js";

const STEPS_SHOWN = 400;
const REFRESH_MS = 1000; // the engine says no oftener what it believes
let running = null; // aborts what is under way

class Lane {
  constructor(title) {
    const found = byId("lane").content.cloneNode(true);
    this.element = found.querySelector("article");
    this.element.querySelector("h2").textContent = title;
    this.steps = found.querySelector(".steps");
    this.output = found.querySelector(".text");
    byId("lanes").append(found);
    this.text = "";
    this.figures = new Figures();
  }

  step(step) {
    this.figures.step(step);
    this.output.append(...coloured(step));
    this.text += step.tokens.map((token) => token.text).join("");
    const bar = document.createElement("i");
    bar.style.height = `${Math.min(100, step.tokens.length * 12)}%`;
    bar.title = `${step.tokens.length} tokens`;
    this.steps.append(bar);
    if (this.steps.childElementCount > STEPS_SHOWN) this.steps.firstChild.remove();
    this.output.scrollTop = this.output.scrollHeight;
    for (const [name, value] of Object.entries(this.figures.told)) {
      this.element.querySelector(`[data-figure=${name}]`).textContent = value;
    }
  }

  async run(enabled, signal) {
    const chat = document.querySelector("input[name=mode]:checked").value === "chat";
    const prompt = byId("prompt").value;
    const asked = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const path = chat ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of streamed(path, { ...asked, ...options(enabled) }, signal)) {
      const step = chunk.choices[0]?.speculation;
      if (step) this.step(step);
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
    say(`${lane.figures.tokens} tokens in ${lane.figures.count} steps`);
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
    const speeds = [on.figures.speed, off.figures.speed];
    const faster = speeds[1] ? ` · ${(speeds[0] / speeds[1]).toFixed(2)}x the speed` : "";
    const same = on.text === off.text;
    const proof = same ? `Both texts are equal, all ${on.figures.tokens} tokens` : "The texts differ";
    say(`${proof}${faster}`, !same);
    byId("message").dataset.equal = String(same);
  });
}

export function begin() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("race").addEventListener("click", race);
  byId("stop").addEventListener("click", () => running?.abort());
}

// Does what a key asks for; the page asks only where this view is shown.
export function pressed(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
  if (event.key === "Escape") running?.abort();
}
