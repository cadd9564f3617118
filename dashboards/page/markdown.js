// An answer's Markdown as elements. HTML in it is text (markdown-it's `html: false`), and whatever markup results passes
// the sanitiser: two walls, either of which would do.

const renderer = window.markdownit({html: false, linkify: false, breaks: false});
const ALLOWED = ["p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "a",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];

// Pictures would ask another host for something; their address is shown instead.
renderer.disable("image");
const inner = {1: "h3", 2: "h4", 3: "h5", 4: "h6", 5: "h6", 6: "h6"};
renderer.core.ruler.push("headings", (state) => {
  // The page's own headings are above an answer's.
  for (const token of state.tokens) if (token.type.startsWith("heading_")) token.tag = inner[token.tag[1]];
});

/** A fragment of safe elements. */
export function rendered(text) {
  const fragment = window.DOMPurify.sanitize(renderer.render(text), {
    ALLOWED_TAGS: ALLOWED,
    ALLOWED_ATTR: ["href", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "copy";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.textContent);
      copy.textContent = "Copied";
    });
    const frame = document.createElement("div");
    frame.className = "code";
    block.tabIndex = 0;
    block.replaceWith(frame);
    frame.append(block, copy);
  }
  return fragment;
}
