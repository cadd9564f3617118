// One answer: the request that a conversation makes, and the stream folded into a message. Nothing here draws.

import {call, chunks} from "./api.js";

const LEAST_MS = 50;

/** Messages as the interface wants them. Reasoning stays out: the model is not shown its earlier thoughts. */
export function history(conversation, system) {
  const told = system.trim() ? [{role: "system", content: system}] : [];
  for (const message of conversation.messages) {
    if (message.role !== "assistant") {
      told.push({role: message.role, content: message.content, ...(message.call ? {tool_call_id: message.call} : {})});
    } else if (message.calls?.length) {
      const calls = message.calls.map((one) => (
        {id: one.id, type: "function", function: {name: one.name, arguments: one.arguments || "{}"}}));
      told.push({role: "assistant", content: message.content || null, tool_calls: calls});
    } else if (message.content) {
      told.push({role: "assistant", content: message.content});
    }
  }
  return told;
}

/** The body of a request. Throws Error with one sentence where the settings make none. */
export function requestBody(conversation, settings, model) {
  const body = {
    model,
    messages: history(conversation, settings.system),
    stream: true,
    stream_options: {include_usage: true},
  };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
  if (settings.tier) body.service_tier = settings.tier;
  if (settings.tools.trim()) {
    try {
      body.tools = JSON.parse(settings.tools);
    } catch (fault) {
      throw new Error(`The tools are not JSON: ${fault.message}`);
    }
  }
  return body;
}

/** The first tool call of the last answer that has no result yet. */
export function openCall(conversation) {
  const at = conversation.messages.findLastIndex((message) => message.role === "assistant");
  const calls = conversation.messages[at]?.calls ?? [];
  const answered = conversation.messages.slice(at + 1).map((message) => message.call);
  return calls.find((one) => !answered.includes(one.id));
}

/** Fill `message` from the service, `changed()` after each piece. Errors and a stop become part of the message. */
export async function stream(body, mode, message, signal, changed) {
  const began = performance.now();
  let first = null;
  let last = null;
  try {
    const headers = mode ? {"x-glm-mode": mode} : {};
    const response = await call("v1/chat/completions", {body, signal, headers});
    message.pool = response.headers.get("x-glm-pool") ?? "";
    const queued = response.headers.get("x-glm-queue-ms");
    message.queueMs = queued === null ? null : Number(queued);
    for await (const chunk of chunks(response)) {
      if (chunk.usage) message.tokens = chunk.usage.completion_tokens;
      if (chunk.service_tier) message.tier = chunk.service_tier;
      for (const choice of chunk.choices ?? []) {
        const {content, reasoning_content: reasoning, tool_calls: calls} = choice.delta ?? {};
        if (content || reasoning || calls) {
          last = performance.now();
          first ??= last;
        }
        message.content += content ?? "";
        message.reasoning += reasoning ?? "";
        for (const piece of calls ?? []) addCall(message.calls, piece);
        if (choice.finish_reason) message.finish = choice.finish_reason;
      }
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = {code: error.code ?? "", message: error.message};
  }
  if (first !== null) message.ttftMs = first - began;
  // What came in one piece has no speed.
  if (message.tokens > 1 && last - first >= LEAST_MS) message.tokensPerS = (message.tokens - 1) / ((last - first) / 1000);
}

function addCall(calls, piece) {
  calls[piece.index] ??= {id: "", name: "", arguments: ""};
  const one = calls[piece.index];
  one.id ||= piece.id ?? "";
  one.name += piece.function?.name ?? "";
  one.arguments += piece.function?.arguments ?? "";
}

export const emptyAnswer = () => ({role: "assistant", content: "", reasoning: "", calls: [], finish: ""});
