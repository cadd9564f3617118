// Conversations and settings in the browser's own storage; bounded, and honest where it is full.

const CONVERSATIONS = "glm5.conversations";
const SETTINGS = "glm5.settings";
const MOST = 50;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or switched off
  }
}

export const DEFAULTS = {system: "", temperature: "", maxTokens: "", tier: "", mode: "", tools: "", model: ""};

export const settings = () => ({...DEFAULTS, ...read(SETTINGS, {})});
export const keepSettings = (value) => write(SETTINGS, value);

/** Newest first. */
export const conversations = () => read(CONVERSATIONS, []);

export const fresh = () => ({id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", at: Date.now(), messages: []});

/** Keep `conversation`; the oldest beyond the limit go. False where the storage refuses. */
export function keep(conversation) {
  const others = conversations().filter((other) => other.id !== conversation.id);
  const first = conversation.messages.find((message) => message.role === "user");
  conversation.title = (first?.content ?? "").slice(0, 60);
  conversation.at = Date.now();
  return write(CONVERSATIONS, [conversation, ...others].slice(0, MOST));
}

export const drop = (id) => write(CONVERSATIONS, conversations().filter((other) => other.id !== id));
export const dropAll = () => localStorage.removeItem(CONVERSATIONS);
