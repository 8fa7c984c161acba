// Conversations, kept in this browser alone.

const KEY = "outrider-chats";
const MOST = 50;
const LONGEST_TITLE = 48;

// The conversations, latest first: { id, system, messages: [{ role, content, thoughts, told }] }.
export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => Array.isArray(chat?.messages)) : [];
  } catch {
    return []; // no storage, or somebody else's
  }
}

// Keeps conversations; the oldest go where the browser has no room.
export function save(chats) {
  const kept = chats.filter((chat) => chat.messages.length).slice(0, MOST);
  while (kept.length) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
      return;
    } catch {
      kept.pop();
    }
  }
  try {
    localStorage.removeItem(KEY);
  } catch {
    // there is no storage: they last as long as the page
  }
}

export function begun() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), system: "", messages: [] };
}

export function title(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "New chat";
  const line = first.trim().split("\n")[0];
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
}
