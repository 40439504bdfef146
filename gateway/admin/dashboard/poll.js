// @ts-check
// A source that is asked again and again while somebody looks: one request at a time, none while the page is hidden.
// What was there stays there when a request fails; `error` and `at` say how old it is.

const PAUSE_MS_MAX = 5000; // between two tries at a source that fails, or as long as between two rounds
const LATE_ROUNDS = 3; // that have brought nothing: what is shown is old

/** @template T */
export class Poll {
  /** @type {T | null} */
  value = null;
  /** When the value came, in ms since the epoch. @type {number | null} */
  at = null;
  /** Of the last try; null where it succeeded. @type {Error | null} */
  error = null;

  #load;
  #everyMs;
  #failures = 0;
  /** @type {Set<(poll: Poll<T>) => void>} */
  #listeners = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** The request that is under way. @type {AbortController | null} */
  #asking = null;
  #wake = () => this.#onVisibility();

  /** @param {(signal: AbortSignal) => Promise<T>} load @param {number} everyMs */
  constructor(load, everyMs) {
    this.#load = load;
    this.#everyMs = everyMs;
  }

  /** Tells the listener of every change until what is returned is called. @param {(poll: Poll<T>) => void} listener */
  subscribe(listener) {
    this.#listeners.add(listener);
    if (this.#listeners.size === 1) {
      document.addEventListener("visibilitychange", this.#wake);
      this.#onVisibility();
    }
    if (this.at !== null || this.error) listener(this);
    return () => {
      this.#listeners.delete(listener);
      if (!this.#listeners.size) this.#rest();
    };
  }

  /** Ask now, and from now on so often. @param {number} [everyMs] */
  refresh(everyMs) {
    this.#everyMs = everyMs ?? this.#everyMs;
    if (this.#listeners.size && !document.hidden) void this.#ask();
  }

  /**
   * Ask for something else: what is under way is not wanted any more.
   * @param {(signal: AbortSignal) => Promise<T>} load
   */
  change(load) {
    this.#load = load;
    this.#asking?.abort();
    this.#asking = null;
    this.refresh();
  }

  /** Whether several rounds have brought nothing. */
  get late() {
    return this.at !== null && Date.now() - this.at > LATE_ROUNDS * this.#everyMs + 1000 && !document.hidden;
  }

  #onVisibility() {
    if (document.hidden) clearTimeout(this.#timer);
    else void this.#ask();
  }

  #rest() {
    document.removeEventListener("visibilitychange", this.#wake);
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
  }

  async #ask() {
    if (this.#asking) return;
    clearTimeout(this.#timer);
    const asking = (this.#asking = new AbortController());
    try {
      const value = await this.#load(asking.signal);
      if (asking.signal.aborted) return;
      [this.value, this.at, this.error, this.#failures] = [value, Date.now(), null, 0];
    } catch (error) {
      if (asking.signal.aborted) return;
      this.error = /** @type {Error} */ (error);
      this.#failures += 1;
    }
    this.#asking = null;
    for (const listener of this.#listeners) listener(this);
    const pause = this.error
      ? Math.min(1000 * 2 ** this.#failures, Math.max(this.#everyMs, PAUSE_MS_MAX))
      : this.#everyMs;
    if (this.#listeners.size && !document.hidden) this.#timer = setTimeout(() => void this.#ask(), pause);
  }
}
