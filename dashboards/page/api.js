// The service's HTTP, seen from the page: addresses beside the page's own, so that it works behind a path prefix.

const base = new URL("./", document.baseURI);
const STORED = "glm5.key";
let asking = null;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The API key of this tab; never in local storage, which outlives it. */
export const key = () => sessionStorage.getItem(STORED) ?? "";

/** Ask for a key, once however many wait; true if one was given. */
export function askKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.querySelector("#ask-key");
    const field = document.querySelector("#ask-key-value");
    document.querySelector("#ask-key-why").textContent = why;
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "use";
      if (given && field.value.trim()) sessionStorage.setItem(STORED, field.value.trim());
      else if (given) sessionStorage.removeItem(STORED);
      field.value = "";
      resolve(given);
    }, {once: true});
    dialog.showModal();
  });
  return asking;
}

async function failure(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // not ours: a proxy's page
  }
  return new ApiError(response.status, told.code ?? String(response.status), told.message ?? response.statusText);
}

/** A response that is ok. `ask`: on a missing key, ask the reader for one and try again. Throws ApiError. */
export async function call(path, {body, signal, headers = {}, ask = true} = {}) {
  for (;;) {
    const response = await fetch(new URL(path, base), {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      headers: {
        ...(body === undefined ? {} : {"content-type": "application/json"}),
        ...(key() ? {authorization: `Bearer ${key()}`} : {}),
        ...headers,
      },
    });
    if (response.ok) return response;
    const error = await failure(response);
    const wants = response.status === 401 || error.code === "operator_key_needed";
    if (!(wants && ask && await askKey(error.message))) throw error;
  }
}

/** Server-sent events of a response: {event, data}. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield {event, data: data.join("\n")};
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a streamed answer, parsed. Throws ApiError at an error event, and where the end is missing. */
export async function* chunks(response) {
  for await (const {event, data} of events(response)) {
    if (data === "[DONE]") return;
    const parsed = JSON.parse(data);
    if (event === "error") throw new ApiError(200, parsed.error.code, parsed.error.message);
    yield parsed;
  }
  throw new ApiError(200, "incomplete", "the connection ended before the answer did");
}
