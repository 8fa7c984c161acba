// The chat: conversations, answers as they come, and the tokens and the race behind each of them.

import { Figures, byId, coloured, options, say, streamed } from "./api.js";
import { refresh } from "./beliefs.js";
import { begun, load, save, title } from "./chats.js";
import { copied, rendered } from "./markdown.js";

const DRAW_MS = 60; // between two drawings of an answer that comes
const NEAR = 80; // pixels from the end within which the page follows an answer
let chats = load();
let chat = begun();
let running = null; // aborts the answer that comes

const log = () => byId("log");

function keep(mine = chat) {
  chats = [mine, ...chats.filter((each) => each.id !== mine.id)];
  save(chats);
  list();
}

// The list of conversations.
function list() {
  const rows = chats.filter((each) => each.messages.length).map((each) => {
    const row = document.createElement("li");
    const open = document.createElement("button");
    open.type = "button";
    open.textContent = title(each);
    open.className = "open";
    if (each.id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => show(each));
    const drop = document.createElement("button");
    drop.type = "button";
    drop.textContent = "×";
    drop.className = "drop";
    drop.setAttribute("aria-label", `Delete “${title(each)}”`);
    drop.addEventListener("click", () => forget(each));
    row.append(open, drop);
    return row;
  });
  byId("chats").replaceChildren(...rows);
}

function forget(each) {
  chats = chats.filter((other) => other.id !== each.id);
  save(chats);
  if (each.id === chat.id) show(begun());
  else list();
}

function show(each) {
  running?.abort();
  chat = each;
  byId("system").value = chat.system;
  log().replaceChildren(...chat.messages.map((message) => new Turn(message).element));
  buttons();
  list();
  say("");
  byId("ask").focus();
  follow(true);
}

function follow(always = false) {
  const page = document.documentElement;
  const end = page.scrollHeight - page.clientHeight;
  if (always || end - page.scrollTop < NEAR) page.scrollTop = page.scrollHeight;
}

// One message on the page.
class Turn {
  constructor(message) {
    this.message = message;
    const found = byId("turn").content.cloneNode(true);
    this.element = found.querySelector("article");
    this.element.classList.add(message.role);
    this.part = (name) => this.element.querySelector(`.${name}`);
    this.part("who").textContent = message.role === "user" ? "You" : "Model";
    this.steps = [];
    this.drawn = 0;
    if (message.role === "assistant") this.wire();
    this.draw();
  }

  wire() {
    const does = {
      copy: (button) => copied(button, this.message.content),
      tokens: () => this.toggle(),
      race: () => race(this),
      again: () => again(),
    };
    for (const [name, work] of Object.entries(does)) {
      const button = this.part(`do-${name}`);
      button.hidden = false;
      button.addEventListener("click", () => work(button));
    }
  }

  toggle() {
    const shown = this.part("tokens").hidden;
    this.part("do-tokens").setAttribute("aria-pressed", String(shown));
    this.part("tokens").hidden = !shown;
    this.part("content").hidden = shown;
    if (shown) this.part("tokens").replaceChildren(...this.steps.flatMap(coloured));
  }

  draw() {
    const { role, content, thoughts, told } = this.message;
    const body = this.part("content");
    if (role === "user") body.textContent = content;
    else {
      try {
        body.replaceChildren(...rendered(content));
      } catch {
        body.textContent = content; // it nests without end
      }
    }
    const thinking = this.part("thoughts");
    thinking.hidden = !thoughts;
    if (thoughts) thinking.querySelector("div").textContent = thoughts;
    this.part("figures").textContent = told ?? "";
    this.part("do-tokens").disabled = !this.steps.length;
    this.part("do-race").disabled = !this.asked;
    this.drawn = performance.now();
  }

  // Takes a chunk of the answer in; it is drawn now and then, since each drawing reads all of it.
  take(chunk, figures) {
    const choice = chunk.choices[0];
    const delta = choice?.delta ?? {};
    this.message.content += delta.content ?? "";
    this.message.thoughts = (this.message.thoughts ?? "") + (delta.reasoning ?? "");
    if (choice?.speculation) {
      this.steps.push(choice.speculation);
      figures.step(choice.speculation);
      if (!this.part("tokens").hidden) this.part("tokens").append(...coloured(choice.speculation));
    }
    if (chunk.seed !== undefined) this.seed = chunk.seed;
    if (choice?.finish_reason === "length") this.cut = true;
    if (performance.now() - this.drawn > DRAW_MS) {
      this.message.told = this.figures(figures);
      this.draw();
      follow();
    }
  }

  figures(figures) {
    if (!figures.tokens) return "";
    const { speed, rate, length, ttft } = figures.told;
    return [
      `${figures.tokens} tokens`, speed && `${speed} tokens/s`, rate && `${rate} of drafts accepted`,
      `${length} tokens per step`, `first token ${ttft}`, this.cut && "cut off: raise Tokens",
    ].filter(Boolean).join(" · ");
  }
}

function buttons() {
  const busy = running !== null;
  byId("send").hidden = busy;
  byId("halt").hidden = !busy;
  const turns = [...log().querySelectorAll(".assistant")];
  turns.forEach((turn, i) => {
    turn.querySelector(".do-again").hidden = i < turns.length - 1 || busy;
    turn.querySelector(".do-race").hidden = busy;
  });
}

// The messages of a call: the system prompt, and what was said without thoughts.
function asked() {
  const system = chat.system.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...chat.messages.map(({ role, content }) => ({ role, content })),
  ];
}

async function under(work) {
  running?.abort();
  const mine = (running = new AbortController());
  buttons();
  try {
    await work(mine.signal);
    if (running === mine) say("");
  } catch (error) {
    if (running !== mine) return;
    if (error.name === "AbortError") say("stopped");
    else say(error.message, true);
  } finally {
    if (running === mine) running = null;
    buttons();
    refresh();
  }
}

// Answers the conversation, which ends with the user's message.
function answer() {
  const mine = chat;
  const body = { messages: asked(), ...options(true) };
  const turn = new Turn({ role: "assistant", content: "" });
  turn.asked = body;
  log().append(turn.element);
  follow(true);
  return under(async (signal) => {
    const figures = new Figures();
    turn.part("content").textContent = "…";
    try {
      for await (const chunk of streamed("v1/chat/completions", body, signal)) turn.take(chunk, figures);
    } finally {
      turn.message.told = turn.figures(figures);
      turn.draw();
      if (turn.message.content || turn.message.thoughts) mine.messages.push(turn.message);
      else turn.element.remove();
      keep(mine);
      follow();
    }
  });
}

function send() {
  const text = byId("ask").value;
  if (!text.trim() || !byId("form").reportValidity()) return;
  const last = chat.messages.at(-1);
  if (last?.role === "user") { // it has no answer, since that failed: this one is in its place
    chat.messages.pop();
    log().lastElementChild?.remove();
  }
  chat.messages.push({ role: "user", content: text });
  log().append(new Turn(chat.messages.at(-1)).element);
  byId("ask").value = "";
  grow();
  keep();
  answer();
}

function again() {
  if (!byId("form").reportValidity()) return;
  while (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
  const turns = [...log().querySelectorAll(".assistant")];
  turns.at(-1)?.remove();
  if (chat.messages.length) answer();
}

// Gives an answer again with its seed, without drafts and then with them.
function race(turn) {
  return under(async (signal) => {
    const verdict = turn.part("verdict");
    const runs = [];
    for (const enabled of [false, true]) {
      verdict.textContent = enabled ? "… with drafts" : "… without drafts";
      const figures = new Figures();
      let text = "";
      const wanted = { ...turn.asked.speculation, enabled };
      const body = { ...turn.asked, seed: turn.seed, speculation: wanted };
      for await (const chunk of streamed("v1/chat/completions", body, signal)) {
        const step = chunk.choices[0]?.speculation;
        if (step) figures.step(step);
        text += (step?.tokens ?? []).map((token) => token.text).join("");
      }
      runs.push({ figures, text });
    }
    const [off, on] = runs;
    const same = off.text === on.text;
    const faster = off.figures.speed ? (on.figures.speed / off.figures.speed).toFixed(2) : "–";
    verdict.textContent =
      `${same ? "Both texts are equal" : "The texts differ"} · ${faster}x the speed with drafts ` +
      `(${on.figures.speed.toFixed(0)} and ${off.figures.speed.toFixed(0)} tokens/s)`;
    verdict.dataset.equal = String(same);
  });
}

function grow() {
  const field = byId("ask");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 3)}px`;
}

export function begin() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  byId("ask").addEventListener("input", grow);
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) send();
    } else if (event.key === "ArrowUp" && !byId("ask").value) {
      byId("ask").value = chat.messages.findLast((each) => each.role === "user")?.content ?? "";
      grow();
    }
  });
  byId("halt").addEventListener("click", () => running?.abort());
  byId("new").addEventListener("click", () => show(begun()));
  byId("system").addEventListener("input", () => {
    chat.system = byId("system").value;
    if (chat.messages.length) keep();
  });
  byId("earlier").open = innerWidth > 640;
  show(chats[0] ?? chat);
}

// Does what a key asks for; the page asks only where this view is shown.
export function pressed(event) {
  if (event.key === "Escape") running?.abort();
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    byId("ask").focus();
  }
}
