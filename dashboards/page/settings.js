// What a request asks for beside its text; kept in this browser.

import {call} from "./api.js";
import {h} from "./dom.js";
import * as store from "./store.js";

const FIELDS = [
  ["system", "System prompt", () => h("textarea", {rows: 2})],
  ["temperature", "Temperature", () => h("input", {type: "number", min: 0, max: 2, step: 0.1, placeholder: "the model's"})],
  ["maxTokens", "Max tokens", () => h("input", {type: "number", min: 1, step: 1, placeholder: "no limit"})],
  ["tier", "Tier", () => choice(["", "auto", "priority", "default", "flex"])],
  ["mode", "Mode", () => choice(["", "latency", "throughput"])],
  ["tools", "Tools (JSON list)", () => h("textarea", {rows: 2, spellcheck: false})],
];

const choice = (values) => h("select", {}, values.map((value) => h("option", {value}, value || "not said")));

export function settingsForm() {
  const inputs = {};
  const kept = store.settings();
  const model = h("select", {id: "set-model"});
  const rows = FIELDS.map(([name, label, make]) => {
    const input = make();
    input.id = `set-${name}`;
    input.value = kept[name];
    input.addEventListener("change", () => store.keepSettings(values()));
    inputs[name] = input;
    return h("div", {className: "field"}, h("label", {for: input.id}, label), input);
  });
  rows.unshift(h("div", {className: "field"}, h("label", {for: "set-model"}, "Model"), model));
  model.addEventListener("change", () => store.keepSettings(values()));

  const values = () => ({
    ...Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value])),
    model: model.value,
  });

  return {
    element: h("details", {className: "settings"}, h("summary", {}, "Settings"), rows),
    values,
    /** The name to ask for; looked up once. Throws ApiError, or Error while nothing is loaded. */
    async model() {
      if (!model.value) {
        const {data} = await (await call("v1/models")).json();
        model.replaceChildren(...data.map(({id}) => h("option", {value: id}, id)));
        if (data.some(({id}) => id === kept.model)) model.value = kept.model;
      }
      if (!model.value) throw new Error("Nothing is loaded yet; see the line above.");
      return model.value;
    },
  };
}
