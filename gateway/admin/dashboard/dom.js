// @ts-check
// Builds and updates elements. Values become text nodes, never markup, so that the names of tenants and models cannot
// inject any.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | readonly any[]} Child  lists hold more of them */

/**
 * Makes an HTML element. Attributes `on…` are listeners. An attribute with the value false is omitted.
 * @param {string} tag @param {Record<string, any> | null} [attributes] @param {...Child} children
 * @returns {any}
 */
export function h(tag, attributes, ...children) {
  return withContent(document.createElement(tag), attributes, children);
}

/**
 * Makes an SVG element.
 * @param {string} tag @param {Record<string, any> | null} [attributes] @param {...Child} children
 * @returns {any}
 */
export function svg(tag, attributes, ...children) {
  return withContent(document.createElementNS(SVG, tag), attributes, children);
}

/** @param {Element} element @param {Record<string, any> | null | undefined} attributes @param {Child[]} children */
function withContent(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...nodes(children));
  return element;
}

/** @param {Child[]} children @returns {(Node | string)[]} */
function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/** Replaces all children. @param {Element} parent @param {...Child} children */
export function fill(parent, ...children) {
  parent.replaceChildren(...nodes(children));
}

/**
 * Replaces all children, unless they are equal already. Keeps the focus.
 * @param {Element} parent @param {...Child} children
 */
export function update(parent, ...children) {
  const wanted = h("div", null, children);
  const same =
    parent.childNodes.length === wanted.childNodes.length &&
    [...wanted.childNodes].every((node, index) => node.isEqualNode(parent.childNodes[index]));
  if (same) return;
  const place = focusIn(parent);
  parent.replaceChildren(...wanted.childNodes);
  focusAt(parent, place);
}

/**
 * Sets the text of a node if it differs, so that a selection is kept.
 * @param {Node} node @param {string | number} text
 */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/**
 * Updates the children of `parent` to match `items`, one row per key. A row with unchanged content stays the same
 * element and so keeps focus and scroll position; a changed row is replaced.
 * @template T
 * @param {Element} parent @param {T[]} items @param {(item: T) => string} key @param {(item: T) => Element} make
 */
export function keyed(parent, items, key, make) {
  const before = new Map([...parent.children].map((child) => [child.getAttribute("data-key"), child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const kept = before.get(name);
    before.delete(name);
    const made = make(item);
    made.setAttribute("data-key", name);
    let element = made;
    if (kept && kept.isEqualNode(made)) element = kept;
    else if (kept) {
      const place = focusIn(kept);
      if (kept === next) next = made;
      kept.replaceWith(made);
      focusAt(made, place);
    }
    if (element === next) next = element.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const gone of before.values()) gone.remove();
}

/**
 * The index of the focused element among the focusable ones in `element`; -1 if none has the focus.
 * @param {Element} element
 */
function focusIn(element) {
  return focusable(element).findIndex((each) => each === document.activeElement);
}

/** @param {Element} element @param {number} place */
function focusAt(element, place) {
  if (place >= 0) focusable(element)[place]?.focus();
}

/** @param {Element} element @returns {HTMLElement[]} */
function focusable(element) {
  return [...element.querySelectorAll("a, button, input, select, summary")].map(
    (each) => /** @type {HTMLElement} */ (each),
  );
}
