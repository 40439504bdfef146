// @ts-check
// A polled source of data: one request at a time, and none while the page is hidden or nothing subscribes. If a request
// fails, the last value stays; `error` and `at` show that it is old.

const PAUSE_MS_MAX = 5000; // longest pause after a failure, unless the normal interval is longer
const LATE_ROUNDS = 3; // missed intervals after which the value is late

/** @template T */
export class Poll {
  /** @type {T | null} */
  value = null;
  /** When the value arrived, in ms since the epoch. @type {number | null} */
  at = null;
  /** Error of the last request; null if it succeeded. @type {Error | null} */
  error = null;

  #load;
  #everyMs;
  #failures = 0;
  /** @type {Set<(poll: Poll<T>) => void>} */
  #listeners = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** The request in flight. @type {AbortController | null} */
  #inFlight = null;
  #wake = () => this.#onVisibility();

  /** @param {(signal: AbortSignal) => Promise<T>} load @param {number} everyMs */
  constructor(load, everyMs) {
    this.#load = load;
    this.#everyMs = everyMs;
  }

  /**
   * Calls the listener on each change. Returns a function that unsubscribes.
   * @param {(poll: Poll<T>) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    if (this.#listeners.size === 1) {
      document.addEventListener("visibilitychange", this.#wake);
      this.#onVisibility();
    }
    if (this.at !== null || this.error) listener(this);
    return () => {
      this.#listeners.delete(listener);
      if (!this.#listeners.size) this.#stop();
    };
  }

  /** Requests now, and from now on at this interval. @param {number} [everyMs] */
  refresh(everyMs) {
    this.#everyMs = everyMs ?? this.#everyMs;
    if (this.#listeners.size && !document.hidden) void this.#fetch();
  }

  /**
   * Changes what is requested, and aborts the request in flight.
   * @param {(signal: AbortSignal) => Promise<T>} load @param {number} [everyMs]
   */
  change(load, everyMs) {
    this.#load = load;
    this.#inFlight?.abort();
    this.#inFlight = null;
    this.refresh(everyMs);
  }

  /** True if no value arrived for several intervals. */
  get late() {
    return this.at !== null && Date.now() - this.at > LATE_ROUNDS * this.#everyMs + 1000 && !document.hidden;
  }

  #onVisibility() {
    if (document.hidden) clearTimeout(this.#timer);
    else void this.#fetch();
  }

  #stop() {
    document.removeEventListener("visibilitychange", this.#wake);
    clearTimeout(this.#timer);
    this.#inFlight?.abort();
    this.#inFlight = null;
  }

  async #fetch() {
    if (this.#inFlight) return;
    clearTimeout(this.#timer);
    const request = (this.#inFlight = new AbortController());
    try {
      const value = await this.#load(request.signal);
      if (request.signal.aborted) return;
      [this.value, this.at, this.error, this.#failures] = [value, Date.now(), null, 0];
    } catch (error) {
      if (request.signal.aborted) return;
      this.error = /** @type {Error} */ (error);
      this.#failures += 1;
    }
    this.#inFlight = null;
    for (const listener of this.#listeners) listener(this);
    const pause = this.error
      ? Math.min(1000 * 2 ** this.#failures, Math.max(this.#everyMs, PAUSE_MS_MAX))
      : this.#everyMs;
    if (this.#listeners.size && !document.hidden) this.#timer = setTimeout(() => void this.#fetch(), pause);
  }
}
