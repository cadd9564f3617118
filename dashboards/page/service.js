// The service view: pools, the curve as load fills it, tiers, errors.

import {askKey} from "./api.js";
import {curveChart, timeChart} from "./charts.js";
import {h, number, percent, seconds, table} from "./dom.js";
import {LiveFeed} from "./watch.js";

const clock = (at) => new Date(at * 1000).toLocaleTimeString();

/** Where a bucket stands on the axis: at its upper end, where powers of two as used in load tests fall. */
export const place = (point) => point.last ?? point.first;

export function serviceView(root) {
  const notice = h("p", {className: "error", role: "alert", hidden: true});
  const unlock = h("button", {type: "button", hidden: true, onclick: async () => {
    if (await askKey("The live figures ask for an operator's key.")) feed.on();
  }}, "Enter an operator's key");
  const pools = h("div");
  const time = h("div");
  const errors = h("div");
  const kept = {}; // by pool: {element, draw}

  root.append(notice, unlock, pools,
    h("div", {className: "panels"},
      h("section", {className: "panel", "aria-label": "Tokens over time"}, h("h2", {}, "Tokens over time"), time),
      h("section", {className: "panel", "aria-label": "Errors"}, h("h2", {}, "Errors"), errors)));
  const drawTime = timeChart(time);

  const feed = new LiveFeed((figures, past) => {
    notice.hidden = unlock.hidden = true;
    for (const pool of figures.pools) {
      kept[pool.pool] ??= poolPanel(pool.pool);
      if (!kept[pool.pool].element.isConnected) pools.append(kept[pool.pool].element);
      kept[pool.pool].draw(pool);
    }
    drawTime(past);
    drawErrors(errors, figures);
    root.dataset.at = figures.at;
  }, (error) => {
    notice.textContent = `No live figures: ${error.message}`;
    notice.hidden = false;
    unlock.hidden = !(error.status === 401 || error.status === 403);
  });
  return {enter: () => feed.on(), leave: () => feed.off()};
}

const line = (label, curve, name) => ({label, points: curve.filter((point) => point[name] !== null)
  .map((point) => ({x: place(point), y: point[name]}))});

function poolPanel(name) {
  const state = h("p");
  const bar = h("progress", {max: 1, "aria-label": `Loading of pool ${name}`, hidden: true});
  const cards = h("dl", {className: "cards"});
  const chart = h("div", {"aria-hidden": "true"});
  const curve = h("div");
  const tiers = h("div");
  const drawCurve = curveChart(chart);
  const element = h("section", {className: "panel", "aria-label": `Pool ${name}`}, h("h2", {}, `Pool ${name}`),
    state, bar, cards, h("h3", {}, "Tok/s by concurrency"), chart, curve, tiers);
  element.dataset.pool = name;

  return {element, draw(pool) {
    const {readiness, minute, total} = pool;
    const eta = readiness.eta_s ? `, ready in about ${seconds(readiness.eta_s)}` : "";
    state.textContent = `${readiness.ready_replicas} of ${readiness.target_replicas} replicas ready · ` +
      `${readiness.phase}${readiness.detail ? `: ${readiness.detail}` : ""}${eta}`;
    bar.hidden = readiness.fraction === null;
    bar.value = readiness.fraction ?? 0;
    cards.replaceChildren(...[
      ["tok/s now", number(pool.tokens_per_s)],
      ["slots in use", `${pool.running} of ${pool.slots}`],
      ["decoding", String(pool.decoding)],
      ["queued", String(pool.queued)],
      ["decode step", pool.predicted_step_s
        ? `${seconds(minute.step_s ?? total.step_s)} (plan ${seconds(pool.predicted_step_s)})`
        : seconds(minute.step_s ?? total.step_s)],
      ["error ratio", percent(minute.error_ratio ?? total.error_ratio, 1)],
      ["MTP acceptance", percent(minute.acceptance ?? total.acceptance)],
      ["KV cache in use", percent(pool.kv_used)],
    ].map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
    const lines = [
      line("since the start", pool.curve, "recorded"),
      line("last minute", pool.curve, "now"),
      line("planned", pool.curve, "predicted"),
    ].filter(({label, points}) => label !== "planned" || points.length);
    drawCurve(lines);
    curve.replaceChildren(table("Tok/s of one replica, by requests decoding at once",
      ["at once", "since the start", "last minute", "planned", "measured for"], pool.curve.map((point) => [
        point.concurrency, number(point.recorded), number(point.now), number(point.predicted), seconds(point.seconds)])));
    tiers.replaceChildren(
      tierTable("Last minute, by tier", minute.tiers), tierTable("Since the start, by tier", total.tiers));
  }};
}

function tierTable(caption, tiers) {
  return table(caption, ["tier", "requests", "tokens", "TTFT p50", "TTFT p95", "queue p95", "prompt from cache"],
    tiers.map((tier) => [tier.tier, String(tier.requests), String(tier.output_tokens), seconds(tier.ttft_p50_s),
      seconds(tier.ttft_p95_s), seconds(tier.queue_p95_s), percent(tier.cached_share)]));
}

function drawErrors(place, figures) {
  const codes = Object.entries(figures.errors);
  place.replaceChildren(
    codes.length ? table("Since the start, by code", ["code", "requests"], codes.map(([code, count]) => [code, String(count)]))
      : h("p", {}, "No request has failed."),
    ...(figures.last_errors.length ? [table("Seen while somebody looked", ["when", "code", "endpoint", "pool", "requests"],
      figures.last_errors.map((one) => [clock(one.at), one.code, one.endpoint, one.pool || "none", String(one.count)]))] : []));
}
