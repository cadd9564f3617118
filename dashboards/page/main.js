// Which view is shown, and what the service says of itself while it loads.

import {askKey, key} from "./api.js";
import {chatView} from "./chat.js";
import {seconds} from "./dom.js";
import {loadView} from "./load.js";
import {serviceView} from "./service.js";

const POLL_MS = 2000;
const views = {chat: chatView, service: serviceView, load: loadView};
const shown = {};

async function show() {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "chat";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const [other, view] of Object.entries(shown)) if (other !== name) view.leave?.();
  shown[name] ??= views[name](document.querySelector(`#${name}`));
  shown[name].enter?.();
}

/** Says what is being waited for until something can serve. */
async function announce() {
  const banner = document.querySelector("#loading");
  for (;;) {
    let ready = true;
    try {
      const state = await (await fetch(new URL("ready", document.baseURI), {cache: "no-store"})).json();
      ready = state.ready;
      const waits = Object.entries(state.pools ?? {}).filter(([, pool]) => !pool.ready_replicas);
      banner.textContent = waits.map(([name, pool]) => {
        const part = pool.fraction === null ? "" : ` ${Math.round(100 * pool.fraction)} %`;
        const eta = pool.eta_s ? `, ready in about ${seconds(pool.eta_s)}` : "";
        return `Pool ${name}: ${pool.phase}${part}${pool.detail ? `, ${pool.detail}` : ""}${eta}.`;
      }).join(" ");
      banner.hidden = waits.length === 0;
    } catch {
      banner.textContent = "The service cannot be reached.";
      banner.hidden = false;
      ready = false;
    }
    document.body.dataset.ready = ready;
    if (ready) dispatchEvent(new Event("serving"));
    await new Promise((next) => setTimeout(next, ready ? 5 * POLL_MS : POLL_MS));
  }
}

document.querySelector("#key").addEventListener("click", () => askKey(
  key() ? "This tab has a key. An empty field forgets it." : "Sent with every request of this tab."));
addEventListener("hashchange", show);
await show();
announce();
