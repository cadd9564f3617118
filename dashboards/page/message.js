// One message as elements.

import {h, seconds} from "./dom.js";
import {rendered} from "./markdown.js";

const WHO = {user: "You", assistant: "Answer", tool: "Tool result"};

/** Children of a message's article. `actions`: {live, open, edit?, again?}. */
export function drawMessage(message, actions) {
  const parts = [h("h2", {className: "who"}, WHO[message.role])];
  if (message.role !== "assistant") {
    parts.push(h("div", {className: "text plain-text"}, message.content));
  } else {
    if (message.reasoning) {
      parts.push(h("details", {className: "reasoning", open: actions.open},
        h("summary", {}, "Reasoning"), h("div", {className: "plain-text"}, message.reasoning)));
    }
    parts.push(h("div", {className: "text"}, rendered(message.content)));
    for (const one of message.calls ?? []) {
      parts.push(h("div", {className: "call"}, h("p", {}, "Calls ", h("code", {}, one.name)),
        h("pre", {tabIndex: 0}, pretty(one.arguments))));
    }
    if (message.error) {
      parts.push(h("p", {className: "error"},
        message.error.code ? `${message.error.code}: ` : "", message.error.message));
    }
    if (!actions.live) parts.push(h("p", {className: "stats"}, stats(message)));
    else if (!message.content && !message.calls?.length) parts.push(h("p", {className: "stats"}, "…"));
  }
  const buttons = [];
  if (actions.edit) buttons.push(h("button", {type: "button", className: "plain", onclick: actions.edit}, "Edit"));
  if (actions.again) buttons.push(h("button", {type: "button", className: "plain", onclick: actions.again}, "Ask again"));
  if (buttons.length) parts.push(h("div", {className: "row"}, buttons));
  return parts;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The line under an answer: what was measured here, and nothing that was not. */
export function stats(message) {
  const told = [];
  if (message.ttftMs !== undefined) told.push(`TTFT ${seconds(message.ttftMs / 1000)}`);
  if (message.tokensPerS !== undefined) told.push(`${message.tokensPerS.toFixed(1)} tok/s`);
  if (message.tokens !== undefined) told.push(`${message.tokens} tokens`);
  if (message.queueMs) told.push(`queued ${seconds(message.queueMs / 1000)}`);
  if (message.pool) told.push(`pool ${message.pool}`);
  if (message.tier) told.push(`tier ${message.tier}`);
  if (message.finish === "stopped") told.push("stopped");
  if (message.finish === "length") told.push("cut at the token limit");
  return told.join(" · ");
}
