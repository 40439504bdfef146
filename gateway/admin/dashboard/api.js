// @ts-check
// Client of the admin API. Sends the admin key with each request, or the cookie of a session and its token.

const TIMEOUT_MS = 20_000;
const CLOCK_SKEW_MS = 2000; // a smaller difference may come from the date header, which counts whole seconds

/** A failed request. The message is the gateway's, if it sent one. */
export class ApiError extends Error {
  /** @param {string} message @param {number} status 0: no reply @param {string | null} [param] the field at fault */
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Who signed in without a key. @typedef {{ name: string, role: string, csrf: string }} Person */

/** How one can sign in besides with a key, and who has. @returns {Promise<{ sign_in: string | null, actor: Person | null }>} */
export async function currentSession() {
  const nobody = { sign_in: null, actor: null };
  try {
    const reply = await fetch("/session", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    return reply.ok ? await reply.json() : nobody;
  } catch {
    return nobody;
  }
}

export class Api {
  #headers;
  #credentials;
  #onRefused;
  #aheadMs = 0;

  /** @param {string | Person} who an admin key, or who signed in without
   *  @param {(reason: string) => void} onRefused called if the key is not valid, or the session has ended */
  constructor(who, onRefused) {
    const hasKey = typeof who === "string";
    this.#headers = hasKey ? { authorization: `Bearer ${who}` } : { "x-csrf-token": who.csrf };
    this.#credentials = /** @type {RequestCredentials} */ (hasKey ? "omit" : "same-origin");
    this.#onRefused = onRefused;
  }

  /** A time of the browser's clock, by the gateway's clock, which dates the calls. @param {number} ms */
  at(ms) {
    return ms + this.#aheadMs;
  }

  /** @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
  async get(path, signal) {
    return (await this.#request("GET", path, undefined, signal)).json();
  }

  /** @param {string} path @param {AbortSignal} [signal] */
  async text(path, signal) {
    return (await this.#request("GET", path, undefined, signal)).text();
  }

  /** @param {string} method @param {string} path @param {object} [body] @returns {Promise<any>} */
  async send(method, path, body) {
    return (await this.#request(method, path, body)).json();
  }

  /** Sends a text that is JSON already, byte for byte. @param {string} path @param {string} text @returns {Promise<any>} */
  async sendText(path, text) {
    return (await this.#request("POST", path, text)).json();
  }

  /** A reply that may stream for as long as it takes. @param {string} path @param {object} body @param {AbortSignal} signal */
  stream(path, body, signal) {
    return this.#request("POST", path, body, signal, null);
  }

  /**
   * @param {string} method @param {string} path @param {object | string} [body] a string is sent as it is
   * @param {AbortSignal} [signal] @param {AbortSignal | null} [timeout] null: none
   */
  async #request(method, path, body, signal, timeout = AbortSignal.timeout(TIMEOUT_MS)) {
    /** @type {Response} */
    let reply;
    try {
      reply = await fetch(path, {
        method,
        headers: {
          ...this.#headers,
          ...(body !== undefined && { "content-type": "application/json" }),
        },
        body: typeof body === "object" ? JSON.stringify(body) : body,
        signal: AbortSignal.any([signal, timeout].filter((each) => each instanceof AbortSignal)),
        cache: "no-store",
        credentials: this.#credentials,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      const late = timeout?.aborted;
      throw new ApiError(late ? `no reply within ${TIMEOUT_MS / 1000} s` : "the gateway is unreachable", 0);
    }
    const ahead = Date.parse(reply.headers.get("date") ?? "") - Date.now();
    this.#aheadMs = Math.abs(ahead) > CLOCK_SKEW_MS ? ahead : 0;
    if (reply.ok) return reply;
    const failure = await reply.json().then(
      (page) => page.error,
      () => null,
    );
    const message = failure?.message ?? `HTTP ${reply.status}`;
    if (reply.status === 401) this.#onRefused(message);
    throw new ApiError(message, reply.status, failure?.param ?? null);
  }
}

/** A path with a query string. Lists become repeated names; null values are omitted.
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
