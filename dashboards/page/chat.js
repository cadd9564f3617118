// The chat view: conversations at the side, messages, a composer, settings.

import {emptyAnswer, openCall, requestBody, stream} from "./answer.js";
import {download, h} from "./dom.js";
import {drawMessage} from "./message.js";
import {settingsForm} from "./settings.js";
import * as store from "./store.js";

const DRAW_MS = 80;

export function chatView(root) {
  let conversation = store.conversations()[0] ?? store.fresh();
  let running = null; // AbortController of the answer under way
  let editing = null; // index of the message that the composer replaces

  const list = h("ul", {className: "conversations"});
  const log = h("div", {className: "log", role: "log", "aria-label": "Messages", "aria-live": "off", tabIndex: 0});
  const said = h("p", {className: "sr", role: "status"});
  const field = h("textarea", {id: "say", rows: 3, placeholder: "Ask something"});
  const label = h("label", {for: "say", className: "sr"}, "Message");
  const send = h("button", {type: "submit", className: "main"}, "Send");
  const stop = h("button", {type: "button", hidden: true, onclick: () => running?.abort()}, "Stop");
  const cancel = h("button", {type: "button", hidden: true, onclick: () => edit(null)}, "Do not edit");
  const form = h("form", {className: "composer"}, label, field, h("div", {className: "row"}, send, stop, cancel));
  const settings = settingsForm();
  const remove = h("button", {type: "button", className: "plain", onclick: deleteAll}, "Delete all");

  root.append(
    h("aside", {className: "side"},
      h("details", {open: innerWidth > 720},
        h("summary", {}, "Conversations"),
        h("button", {type: "button", onclick: () => open(store.fresh())}, "New conversation"),
        list,
        h("div", {className: "row"},
          h("button", {type: "button", className: "plain", onclick: () => download(
            "conversations.json", JSON.stringify(store.conversations(), null, 1))}, "Export all"),
          remove)),
      settings.element),
    h("div", {className: "talk"}, log, said, form));

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      if (running) running.abort();
      else edit(null);
    }
  });

  function deleteAll() {
    // Two presses, so that one slip deletes nothing.
    if (remove.dataset.sure) {
      store.dropAll();
      open(store.fresh());
    }
    remove.dataset.sure = remove.dataset.sure ? "" : "yes";
    remove.textContent = remove.dataset.sure ? "Really delete all" : "Delete all";
  }

  function open(one) {
    running?.abort();
    conversation = one;
    edit(null);
    draw();
  }

  function edit(at) {
    editing = at;
    field.value = at === null ? "" : conversation.messages[at].content;
    cancel.hidden = at === null;
    if (at !== null) field.focus();
  }

  function submit() {
    const text = field.value.trim();
    if (!text || running) return;
    if (editing !== null) conversation.messages.length = editing;
    const wanted = editing === null ? openCall(conversation) : undefined;
    edit(null);
    conversation.messages.push(wanted ? {role: "tool", content: text, call: wanted.id} : {role: "user", content: text});
    if (openCall(conversation)) draw(); // another call waits for its result
    else answer();
  }

  function again() {
    while (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
    answer();
  }

  async function answer() {
    const mine = conversation;
    const controller = new AbortController();
    const chosen = settings.values();
    running = controller;
    let message = emptyAnswer();
    let body = null;
    try {
      body = requestBody(mine, chosen, chosen.model || (await settings.model()));
    } catch (fault) {
      message.error = {code: "", message: fault.message};
    }
    mine.messages.push(message);
    draw();
    const element = log.lastElementChild;
    said.textContent = "The answer is being written.";
    let due = 0;
    const changed = () => {
      due ||= setTimeout(() => {
        due = 0;
        if (mine === conversation) redraw(element, message, true);
      }, DRAW_MS);
    };
    if (body) await stream(body, chosen.mode, message, controller.signal, changed);
    clearTimeout(due);
    if (running === controller) running = null;
    const kept = store.keep(mine);
    if (mine === conversation) {
      draw();
      said.textContent = message.error ? `Error: ${message.error.message}` : "The answer is complete.";
      if (!kept) said.textContent += " This browser's storage is full: the conversation is not kept.";
    } else {
      drawList();
    }
  }

  function redraw(element, message, live) {
    const low = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    const open = element.querySelector("details.reasoning")?.open ?? false;
    element.replaceChildren(...drawMessage(message, {live, open}));
    if (low) log.scrollTop = log.scrollHeight;
  }

  function draw() {
    const messages = conversation.messages.map((message, at) => {
      const live = Boolean(running) && at === conversation.messages.length - 1;
      const actions = {live, open: false};
      if (!running && message.role === "user") actions.edit = () => edit(at);
      if (!running && message.role === "assistant" && at === conversation.messages.length - 1) actions.again = again;
      return h("article", {className: `message ${message.role}`}, drawMessage(message, actions));
    });
    if (!messages.length) messages.push(h("p", {className: "empty"}, "Nothing said yet. What you write stays in this browser."));
    log.replaceChildren(...messages);
    log.scrollTop = log.scrollHeight;
    const wanted = running ? undefined : openCall(conversation);
    field.placeholder = wanted ? `Result of ${wanted.name}` : "Ask something";
    label.textContent = wanted ? `Result of the tool call ${wanted.name}` : "Message";
    send.disabled = Boolean(running);
    stop.hidden = !running;
    drawList();
  }

  function drawList() {
    list.replaceChildren(...store.conversations().map((one) => h("li", {},
      h("button", {type: "button", className: "plain open", "aria-current": one.id === conversation.id ? "true" : undefined,
        onclick: () => open(one)}, one.title || "Untitled"),
      h("button", {type: "button", className: "plain", "aria-label": `Delete ${one.title}`, onclick: () => {
        store.drop(one.id);
        if (one.id === conversation.id) open(store.fresh());
        else drawList();
      }}, "✕"))));
  }

  // Once, so that a reader who gives no key now is asked again only when a message is sent.
  addEventListener("serving", () => settings.model().catch(() => {}), {once: true});
  draw();
  return {enter: () => field.focus()};
}
