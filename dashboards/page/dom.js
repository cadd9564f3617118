// Elements from plain data. Text is always text here: nothing in this file parses markup.

/** An element; `props` are properties, `data-*`/`aria-*` attributes, or listeners (`onclick`). */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function number(value, digits = 1) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

/** A table with a caption; cells are text or elements, the first of each row is its header. */
export function table(caption, heads, rows) {
  return h("div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": caption},
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", {scope: "col"}, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        row.map((cell, at) => h(at ? "td" : "th", at ? {} : {scope: "row"}, cell)))))));
}

/** Save `text` as a file of the reader's. */
export function download(name, text) {
  const link = h("a", {download: name, href: URL.createObjectURL(new Blob([text], {type: "application/json"}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
