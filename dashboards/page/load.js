// The load view: ask, sweep, show; and lay a stored run over it.

import {call} from "./api.js";
import {curveChart} from "./charts.js";
import {h, number, seconds, table} from "./dom.js";
import {LEVELS, LEVEL_MS, MOST_MS, refusal, storedRun, sweep, TOKENS} from "./sweep.js";
import {LiveFeed} from "./watch.js";

export function loadView(root) {
  let running = null;
  let measured = [];
  let stored = [];
  let name = "";

  const others = h("input", {type: "checkbox", id: "others"});
  const said = h("p", {role: "status"});
  const start = h("button", {type: "button", className: "main", onclick: begin}, "Start a sweep");
  const stop = h("button", {type: "button", hidden: true, onclick: () => running?.abort()}, "Stop");
  const file = h("input", {type: "file", id: "run", accept: ".json,application/json"});
  const chart = h("div", {"aria-hidden": "true"});
  const tables = h("div");
  const sure = h("dialog", {"aria-labelledby": "sure-title"}, h("form", {method: "dialog"},
    h("h2", {id: "sure-title"}, "Start a load test?"),
    h("p", {}, `${LEVELS.join(", ")} users, ${TOKENS} tokens each, about ${Math.round(LEVELS.length * LEVEL_MS / 1000)} s ` +
      `and at most ${MOST_MS / 1000} s. It takes slots of this service meanwhile.`),
    h("div", {className: "row"}, h("button", {value: "go", className: "main"}, "Start"), h("button", {value: ""}, "Cancel"))));

  root.append(
    h("section", {className: "panel", "aria-label": "Sweep"}, h("h2", {}, "A short load test"),
      h("p", {className: "hint"}, "Users of a level are prompts of one streamed request, sent in waves; figures are this " +
        "browser's own. For figures to publish, use glm5 load."),
      h("div", {className: "row"}, start, stop, others, h("label", {for: "others"}, "Start although others are being served")),
      said),
    h("section", {className: "panel", "aria-label": "Curve", }, h("h2", {}, "Tok/s by users"), chart, tables,
      h("div", {className: "row"}, h("label", {for: "run"}, "Lay over a stored run (summary.json of glm5 load)"), file)),
    sure);
  const drawCurve = curveChart(chart);
  const feed = new LiveFeed(() => {}, () => {});

  async function begin() {
    const why = refusal(feed.figures, others.checked);
    if (why) {
      said.textContent = why;
      return;
    }
    sure.returnValue = "";
    sure.showModal();
    await new Promise((closed) => sure.addEventListener("close", closed, {once: true}));
    if (sure.returnValue !== "go") return;
    running = new AbortController();
    measured = [];
    start.disabled = true;
    stop.hidden = false;
    said.textContent = `Measuring ${LEVELS[0]} user.`;
    try {
      const {data} = await (await call("v1/models")).json();
      if (!data.length) throw new Error("nothing is loaded yet");
      await sweep(data[0].id, running.signal, (level) => {
        measured.push(level);
        const next = LEVELS[measured.length];
        said.textContent = next ? `Measuring ${next} users.` : "Done.";
        draw();
      });
    } catch (error) {
      const ends = {AbortError: "Stopped.", TimeoutError: `Stopped after ${MOST_MS / 1000} s.`};
      said.textContent = ends[error.name] ?? `Failed: ${error.message}`;
    }
    running = null;
    start.disabled = false;
    stop.hidden = true;
  }

  async function lay(given) {
    if (!given) return;
    try {
      stored = storedRun(await given.text());
      name = given.name;
      said.textContent = `Laid over: ${name}.`;
    } catch (error) {
      said.textContent = error.message;
    }
    draw();
  }

  file.addEventListener("change", () => lay(file.files[0]));
  root.addEventListener("dragover", (event) => event.preventDefault());
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    lay(event.dataTransfer.files[0]);
  });

  function draw() {
    const line = (label, levels) => ({label, points: levels.map((one) => ({x: one.users, y: one.tokensPerS}))});
    drawCurve([line("this sweep", measured), ...(stored.length ? [line("stored run", stored)] : [])]);
    const rows = (levels) => levels.map((one) => [String(one.users), number(one.tokensPerS), number(one.perUser),
      seconds(one.ttftP50), seconds(one.ttftP95)]);
    const heads = ["users", "tok/s", "tok/s a user", "TTFT p50", "TTFT p95"];
    tables.replaceChildren(
      ...(measured.length ? [table("This sweep", heads, rows(measured))] : []),
      ...(stored.length ? [table(`Stored run ${name}`, heads, rows(stored))] : []));
  }

  return {
    enter: () => {
      feed.on();
      draw();
    },
    leave: () => feed.off(),
  };
}
