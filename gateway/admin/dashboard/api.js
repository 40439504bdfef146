// @ts-check
// The admin API, asked with the admin key.

const ANSWER_MS_MAX = 20_000;
const CLOCKS_APART_MS = 2000; // less may come of the seconds in which replies are dated

/** What went wrong, in the server's words where it said any. */
export class ApiError extends Error {
  /** @param {string} message @param {number} status 0: no answer came @param {string | null} [param] the field meant */
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export class Api {
  #key;
  #onRefused;
  #aheadMs = 0;

  /** @param {string} key @param {(words: string) => void} onRefused told when the key is not valid (any more) */
  constructor(key, onRefused) {
    this.#key = key;
    this.#onRefused = onRefused;
  }

  /** A moment by the gateway's clock, which dates the calls; the browser's may go otherwise. @param {number} ms */
  at(ms) {
    return ms + this.#aheadMs;
  }

  /** @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
  async get(path, signal) {
    return (await this.#ask("GET", path, undefined, signal)).json();
  }

  /** @param {string} path @param {AbortSignal} [signal] */
  async text(path, signal) {
    return (await this.#ask("GET", path, undefined, signal)).text();
  }

  /** @param {string} method @param {string} path @param {object} [body] @returns {Promise<any>} */
  async send(method, path, body) {
    return (await this.#ask(method, path, body)).json();
  }

  /** @param {string} method @param {string} path @param {object} [body] @param {AbortSignal} [signal] */
  async #ask(method, path, body, signal) {
    const patience = AbortSignal.timeout(ANSWER_MS_MAX);
    /** @type {Response} */
    let reply;
    try {
      reply = await fetch(path, {
        method,
        headers: { authorization: `Bearer ${this.#key}`, ...(body && { "content-type": "application/json" }) },
        body: body && JSON.stringify(body),
        signal: signal ? AbortSignal.any([signal, patience]) : patience,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      const late = patience.aborted;
      throw new ApiError(late ? `no answer within ${ANSWER_MS_MAX / 1000} s` : "the gateway can not be reached", 0);
    }
    const ahead = Date.parse(reply.headers.get("date") ?? "") - Date.now();
    this.#aheadMs = Math.abs(ahead) > CLOCKS_APART_MS ? ahead : 0;
    if (reply.ok) return reply;
    const said = await reply.json().then(
      (page) => page.error,
      () => null,
    );
    const words = said?.message ?? `HTTP ${reply.status}`;
    if (reply.status === 401) this.#onRefused(words);
    throw new ApiError(words, reply.status, said?.param ?? null);
  }
}

/** A path with its query; lists become repeated names, and what is null is left out.
 * @param {string} path @param {Record<string, any>} query */
export function withQuery(path, query) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") search.append(name, String(each));
    }
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}
