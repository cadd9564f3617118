// A short load test from the page. A browser opens few connections to one host, so the users of a level are the prompts of
// one streamed request: the service decodes each as a request of its own.

import {call, chunks} from "./api.js";

export const LEVELS = [1, 2, 4, 8];
export const TOKENS = 64;
export const LEVEL_MS = 6000;
export const MOST_MS = 60_000;
const WAVES = 5;

/** Why a sweep may not start now, or "". `figures`: the latest live ones, or null. */
export function refusal(figures, told) {
  if (told) return "";
  if (!figures) return "Whether others are being served cannot be seen; tick the box to start all the same.";
  if (!figures.ready) return "The service cannot serve yet.";
  const busy = figures.in_flight + figures.pools.reduce((sum, pool) => sum + pool.queued, 0);
  return busy ? `${busy} requests of others are being served; tick the box to start all the same.` : "";
}

const quantile = (sorted, q) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : null);

/** One level's figures from its waves: [{tokens, choices: [{first, last, began}]}], milliseconds. */
export function summary(users, waves) {
  const spanned = waves.map((wave) => ({
    tokens: wave.tokens - users,
    ms: Math.max(...wave.choices.map((one) => one.last)) - Math.min(...wave.choices.map((one) => one.first)),
  }));
  const tokens = spanned.reduce((sum, wave) => sum + wave.tokens, 0);
  const ms = spanned.reduce((sum, wave) => sum + wave.ms, 0);
  const ttft = waves.flatMap((wave) => wave.choices.map((one) => (one.first - one.began) / 1000)).sort((a, b) => a - b);
  const tokensPerS = ms > 0 ? tokens / (ms / 1000) : null;
  return {users, waves: waves.length, tokensPerS, perUser: tokensPerS === null ? null : tokensPerS / users,
    ttftP50: quantile(ttft, 0.5), ttftP95: quantile(ttft, 0.95)};
}

async function wave(model, users, signal) {
  const mark = Math.random().toString(36).slice(2); // no prompt is in a cache
  const prompts = Array.from({length: users}, (_, at) => `${mark} ${at}: tell a long story about a river and a bridge.`);
  const began = performance.now();
  const choices = prompts.map(() => ({began, first: null, last: null}));
  const response = await call("v1/completions", {signal, headers: {"x-request-timeout": String(MOST_MS / 1000)}, body: {
    model, prompt: prompts, max_tokens: TOKENS, ignore_eos: true, stream: true, stream_options: {include_usage: true}}});
  let tokens = 0;
  for await (const chunk of chunks(response)) {
    const now = performance.now();
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    for (const choice of chunk.choices ?? []) {
      if (!choice.text) continue;
      choices[choice.index].first ??= now;
      choices[choice.index].last = now;
    }
  }
  if (choices.some((one) => one.first === null)) throw new Error("An answer came without text.");
  return {tokens, choices};
}

/** Run all levels; `level(summary)` after each. Ends at MOST_MS whatever happens. */
export async function sweep(model, signal, level) {
  const bound = AbortSignal.any([signal, AbortSignal.timeout(MOST_MS)]);
  for (const users of LEVELS) {
    const waves = [];
    const ends = performance.now() + LEVEL_MS;
    do waves.push(await wave(model, users, bound));
    while (waves.length < WAVES && performance.now() < ends);
    level(summary(users, waves));
  }
}

/** Levels of a stored run (`summary.json` of `glm5 load`). Throws Error in one sentence. */
export function storedRun(text) {
  let tree;
  try {
    tree = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON; drop summary.json of a run of glm5 load.");
  }
  if (tree?.format !== 1 || !Array.isArray(tree.levels)) {
    throw new Error("This is no run of glm5 load: its summary.json has format 1 and a list of levels.");
  }
  const levels = tree.levels.filter((one) => one.concurrency > 0 && one.measured?.output_tok_s > 0);
  if (!levels.length) throw new Error("This run has no level with a concurrency and tok/s.");
  return levels.map((one) => ({users: one.concurrency, waves: one.measured.ok, tokensPerS: one.measured.output_tok_s,
    perUser: one.measured.per_user_tok_s?.p50 ?? null, ttftP50: one.measured.ttft?.p50 ?? null,
    ttftP95: one.measured.ttft?.p95 ?? null}));
}
