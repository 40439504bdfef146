// @ts-check
// The frame around all pages: sign-in, routing by the address, and the age of the data.

import { Api, currentSession } from "./api.js";
import { fill, h, setText, update } from "./dom.js";
import { clock, span } from "./format.js";
import { batchesPage } from "./pages/batches.js";
import { callsPage } from "./pages/calls.js";
import { keysPage } from "./pages/keys.js";
import { nowPage } from "./pages/now.js";
import { playgroundPage } from "./pages/playground.js";
import { policyPage } from "./pages/policy.js";
import { prefixesPage } from "./pages/prefixes.js";
import { spendPage } from "./pages/spend.js";
import { tenantsPage } from "./pages/tenants.js";
import { signInForm, takeRefusalFromAddress } from "./sign_in.js";
import { makeSources } from "./sources.js";
import { state, time } from "./widgets.js";

/**
 * @typedef {{ path: string[], query: URLSearchParams }} Location
 * @typedef {{ element: Element, show: (place: Location) => void, close: () => void }} Page
 * @typedef {(path: string[], query?: Record<string, any>) => void} Go
 * @typedef {{ api: Api, sources: import("./sources.js").Sources, go: Go }} Context
 */

const KEY_ITEM = "warmpath-admin-key"; // in the session storage, which lasts as long as the tab
const CLOCK_MS = 1000;

/** @type {[name: string, title: string, make: (context: Context) => Page][]} */
const PAGES = [
  ["now", "Now", nowPage],
  ["calls", "Calls", callsPage],
  ["batches", "Batches", batchesPage],
  ["spend", "Spend", spendPage],
  ["tenants", "Tenants", tenantsPage],
  ["keys", "Keys", keysPage],
  ["prefixes", "Prefixes", prefixesPage],
  ["policy", "Policy", policyPage],
  ["playground", "Playground", playgroundPage],
];

const root = /** @type {HTMLElement} */ (document.getElementById("app"));

/** The open session; null while the sign-in form is shown. @type {{ close: () => void, route: () => void } | null} */
let session = null;

/** Takes the key from `#key=…` and removes it from the address and the history at once. */
function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key !== null) history.replaceState(null, "", location.pathname);
  return key;
}

/** @returns {Location} */
function currentLocation() {
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
  const samePage = location.hash.split("?")[0] === wanted.split("?")[0];
  if (!samePage) location.hash = wanted;
  else {
    history.replaceState(null, "", wanted); // a changed filter is not a step to go back to
    session?.route();
  }
}

/** Ends the session and shows the sign-in form. @param {string} [reason] shown in the form */
function showSignIn(reason = "") {
  session?.close();
  session = null;
  sessionStorage.removeItem(KEY_ITEM);
  const form = signInForm(reason, signIn);
  document.title = "Warmpath";
  fill(root, h("main", null, form.element));
  form.focus();
}

/** Ends a person's sessions at the gateway, and leads to the provider's sign-out page. @param {Api} api */
async function signOut(api) {
  try {
    const reply = await api.send("POST", "/session/sign-out");
    if (reply.continue !== null) location.assign(reply.continue);
    else showSignIn();
  } catch (error) {
    showSignIn(/** @type {Error} */ (error).message);
  }
}

/** @param {string | import("./api.js").Person} who an admin key, or who signed in without */
function signIn(who) {
  if (typeof who === "string") sessionStorage.setItem(KEY_ITEM, who);
  const api = new Api(who, (reason) => session === mine && showSignIn(reason));
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
      "Skip to content",
    ),
    h(
      "header",
      null,
      h("a", { class: "brand", href: "#/now" }, "Warmpath"),
      h("nav", { "aria-label": "Pages" }, links),
      h("span", { class: "grow" }),
      fresh,
      typeof who !== "string" && h("span", { class: "dim person", title: `Role: ${who.role}` }, who.name),
      h(
        "button",
        { type: "button", class: "quiet small", onclick: () => (typeof who === "string" ? showSignIn() : signOut(api)) },
        "Sign out",
      ),
    ),
    banner,
    main,
  );
  /** @type {Page | null} */
  let page = null;
  let shown = "";

  function route() {
    const place = currentLocation();
    const [name, title, make] = PAGES.find(([each]) => each === place.path[0]) ?? PAGES[0];
    if (name !== shown) {
      page?.close();
      page = make({ api, sources, go });
      shown = name;
      document.title = `${title} · Warmpath`;
      links.forEach((link, index) => {
        if (PAGES[index][0] !== name) return link.removeAttribute("aria-current");
        link.setAttribute("aria-current", "page");
        link.scrollIntoView({ block: "nearest", inline: "nearest" }); // in a narrow window, links scroll sideways
      });
      fill(main, page.element);
      scrollTo(0, 0);
    }
    page?.show(place);
  }

  /** Shows the age of the data, and a banner if it is stale. */
  function showFreshness() {
    const { at, error, late } = sources.metrics;
    const stale = late || error !== null;
    main.classList.toggle("stale", stale);
    const age = at === null ? "" : `${clock(new Date(at))}, ${span(Math.max(0, (Date.now() - at) / 1000))} ago`;
    if (at === null && !error) setText(fresh, "connecting …");
    else
      update(
        fresh,
        stale ? state("bad", "not live") : state("good", "live"),
        h("span", { class: "dim age" }, ` ${age}`),
      );
    const since = at === null ? "" : [" Data as of ", time(at), "."];
    const reason = error?.message ?? "no recent data";
    update(
      banner,
      stale &&
        h(
          "div",
          { class: "trouble" },
          h("span", null, `The data is stale: ${reason}.`, since, " Retrying automatically."),
          h("button", { type: "button", class: "quiet small", onclick: () => sources.metrics.refresh() }, "Retry now"),
        ),
    );
  }

  const ticking = setInterval(showFreshness, CLOCK_MS);
  const end = sources.metrics.subscribe(showFreshness);
  const mine = (session = {
    route,
    close() {
      end();
      clearInterval(ticking);
      page?.close();
    },
  });
  showFreshness();
  route();
}

window.addEventListener("hashchange", () => {
  const given = takeKeyFromAddress();
  if (given !== null) {
    session?.close();
    signIn(given);
  } else session?.route();
});

const first = takeKeyFromAddress() ?? sessionStorage.getItem(KEY_ITEM);
const refusal = takeRefusalFromAddress();
if (first) signIn(first);
else {
  const { actor } = await currentSession();
  if (actor !== null) signIn(actor);
  else showSignIn(refusal);
}
