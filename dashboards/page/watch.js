// The live figures: one subscription for whichever views look, with a short memory for the chart of time.

import {ApiError, call, events} from "./api.js";

const AGAIN_MS = 3000;
const KEPT = 300; // five minutes

/** Calls `tell(figures, past)` with each message and `trouble(error)` when there is none, while it is on. */
export class LiveFeed {
  past = []; // {at, tokensPerS}, oldest first
  figures = null;
  #controller = null;

  constructor(tell, trouble) {
    this.tell = tell;
    this.trouble = trouble;
  }

  on() {
    if (this.#controller) return;
    this.#controller = new AbortController();
    this.#follow(this.#controller.signal);
  }

  off() {
    this.#controller?.abort();
    this.#controller = null;
  }

  async #follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await call("v1/service/live", {signal, ask: false});
        for await (const {event, data} of events(response)) {
          if (signal.aborted) return;
          const parsed = JSON.parse(data);
          if (event === "error") throw new ApiError(200, parsed.error.code, parsed.error.message);
          this.figures = parsed;
          this.past.push({at: parsed.at, tokensPerS: parsed.pools.reduce((sum, pool) => sum + pool.tokens_per_s, 0)});
          if (this.past.length > KEPT) this.past.shift();
          this.tell(parsed, this.past);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.figures = null;
        this.trouble(error);
        if (error.status === 401 || error.status === 403) {
          this.off(); // until the reader gives another key
          return;
        }
        await new Promise((next) => setTimeout(next, AGAIN_MS));
      }
    }
  }
}
