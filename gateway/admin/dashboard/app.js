// @ts-check
// The frame: signing in, the address, which page is shown, and how fresh everything is.

import { Api } from "./api.js";
import { fill, h, say, update } from "./dom.js";
import { clock, span } from "./format.js";
import { callsPage } from "./pages/calls.js";
import { keysPage } from "./pages/keys.js";
import { nowPage } from "./pages/now.js";
import { prefixesPage } from "./pages/prefixes.js";
import { spendPage } from "./pages/spend.js";
import { makeSources } from "./sources.js";
import { state, time } from "./widgets.js";

/**
 * @typedef {{ path: string[], query: URLSearchParams }} Place
 * @typedef {{ element: Element, show: (place: Place) => void, close: () => void }} Page
 * @typedef {(path: string[], query?: Record<string, any>) => void} Go
 * @typedef {{ api: Api, sources: import("./sources.js").Sources, go: Go }} Context
 */

const KEPT_KEY = "warmpath-admin-key"; // in the session storage: as long as the tab is open
const CLOCK_MS = 1000;

/** @type {[name: string, title: string, make: (context: Context) => Page][]} */
const PAGES = [
  ["now", "Now", nowPage],
  ["calls", "Calls", callsPage],
  ["spend", "Spend", spendPage],
  ["prefixes", "Prefixes", prefixesPage],
  ["keys", "Keys", keysPage],
];

const root = /** @type {HTMLElement} */ (document.getElementById("app"));

/** What there is while somebody is signed in. @type {{ close: () => void, route: () => void } | null} */
let session = null;

/** The key of `#key=…`, which leaves the address, and with it the history, at once. */
function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key !== null) history.replaceState(null, "", location.pathname);
  return key;
}

/** @returns {Place} */
function placeNow() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").map(decoded), query: new URLSearchParams(query) };
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @type {Go} */
function go(path, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  const wanted = `#/${path.map(encodeURIComponent).join("/")}${search && `?${search}`}`;
  const samePlace = location.hash.split("?")[0] === wanted.split("?")[0];
  if (!samePlace) location.hash = wanted;
  else {
    history.replaceState(null, "", wanted); // a filter is no step to go back to
    session?.route();
  }
}

/** @param {string} [words] why it is asked for */
function askForKey(words = "") {
  session?.close();
  session = null;
  sessionStorage.removeItem(KEPT_KEY);
  const box = h("input", {
    type: "password",
    id: "key",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const refusal = h("p", { class: "refusal", role: "alert" }, words);
  const submit = h("button", { type: "submit" }, "Sign in");
  const form = h(
    "form",
    { class: "sign-in", onsubmit: onSubmit },
    h("h1", null, "Warmpath"),
    h("input", { type: "text", autocomplete: "username", value: "admin", hidden: true }), // for who keeps passwords
    h("label", { class: "field", for: "key" }, h("span", null, "Admin key"), box),
    refusal,
    submit,
    h(
      "p",
      { class: "dim" },
      "The value of ",
      h("code", null, "WARMPATH_ADMIN_KEY"),
      ". ",
      h("code", null, "warmpath up"),
      " prints an address that has it. It is kept in this tab alone.",
    ),
  );

  /** @param {SubmitEvent} event */
  async function onSubmit(event) {
    event.preventDefault();
    submit.disabled = true;
    refusal.textContent = "";
    try {
      await new Api(box.value.trim(), () => {}).get("/admin/state");
      signIn(box.value.trim());
    } catch (error) {
      refusal.textContent = /** @type {Error} */ (error).message;
      submit.disabled = false;
      box.select();
    }
  }

  document.title = "Warmpath";
  fill(root, h("main", null, form));
  box.focus();
}

/** @param {string} key */
function signIn(key) {
  sessionStorage.setItem(KEPT_KEY, key);
  const api = new Api(key, (words) => session === mine && askForKey(words));
  const sources = makeSources(api);
  const main = h("main", { id: "main", tabindex: -1 });
  const banner = h("div", { role: "status" });
  const fresh = h("span", { class: "fresh" });
  const links = PAGES.map(([name, title]) => h("a", { href: `#/${name}` }, title));
  fill(
    root,
    h(
      "a",
      { class: "skip", href: "#main", onclick: (/** @type {Event} */ event) => (event.preventDefault(), main.focus()) },
      "To the content",
    ),
    h(
      "header",
      null,
      h("a", { class: "brand", href: "#/now" }, "Warmpath"),
      h("nav", { "aria-label": "Pages" }, links),
      h("span", { class: "grow" }),
      fresh,
      h("button", { type: "button", class: "quiet small", onclick: () => askForKey() }, "Sign out"),
    ),
    banner,
    main,
  );
  /** @type {Page | null} */
  let page = null;
  let shown = "";

  function route() {
    const place = placeNow();
    const [name, title, make] = PAGES.find(([each]) => each === place.path[0]) ?? PAGES[0];
    if (name !== shown) {
      page?.close();
      page = make({ api, sources, go });
      shown = name;
      document.title = `${title} · Warmpath`;
      links.forEach((link, index) =>
        PAGES[index][0] === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"),
      );
      fill(main, page.element);
      scrollTo(0, 0);
    }
    page?.show(place);
  }

  /** How old the figures are, and what to do about it. */
  function tell() {
    const { at, error, late } = sources.metrics;
    const old = late || error !== null;
    main.classList.toggle("stale", old);
    const age = at === null ? "" : `${clock(new Date(at))}, ${span(Math.max(0, (Date.now() - at) / 1000))} ago`;
    if (at === null && !error) say(fresh, "connecting …");
    else
      update(fresh, old ? state("bad", "not live") : state("good", "live"), h("span", { class: "dim age" }, ` ${age}`));
    const since = at === null ? "" : [" What is shown is as of ", time(at), "."];
    const why = error?.message ?? "no figures have come lately";
    update(
      banner,
      old &&
        h(
          "div",
          { class: "trouble" },
          h("span", null, `The figures are old: ${why}.`, since, " It is tried again by itself."),
          h("button", { type: "button", class: "quiet small", onclick: () => sources.metrics.refresh() }, "Try now"),
        ),
    );
  }

  const ticking = setInterval(tell, CLOCK_MS);
  const end = sources.metrics.subscribe(tell);
  const mine = (session = {
    route,
    close() {
      end();
      clearInterval(ticking);
      page?.close();
    },
  });
  tell();
  route();
}

window.addEventListener("hashchange", () => {
  const given = takeKeyFromAddress();
  if (given !== null) {
    session?.close();
    signIn(given);
  } else session?.route();
});

const first = takeKeyFromAddress() ?? sessionStorage.getItem(KEPT_KEY);
if (first) signIn(first);
else askForKey();
