// @ts-check
// Elements are built from values, never from text that is read as markup: whatever a tenant or a model is called, it is
// shown as it is written.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | readonly any[]} Child  lists hold more of them */

/**
 * An HTML element. `on…` attributes are listeners; true and false are attributes that are there or not.
 * @param {string} tag @param {Record<string, any> | null} [attributes] @param {...Child} children
 * @returns {any}
 */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * An SVG element.
 * @param {string} tag @param {Record<string, any> | null} [attributes] @param {...Child} children
 * @returns {any}
 */
export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** @param {Element} element @param {Record<string, any> | null | undefined} attributes @param {Child[]} children */
function filled(element, attributes, children) {
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

/** @param {Element} parent @param {...Child} children */
export function fill(parent, ...children) {
  parent.replaceChildren(...nodes(children));
}

/**
 * As `fill`, but nothing happens where the same is there already.
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

/** Writes only what has changed, so that what is selected stays so. @param {Node} node @param {string | number} text */
export function say(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/**
 * Brings the children of `parent` into line with `items`. A row stays the same element as long as its key is there, and
 * with it the focus and the place that was scrolled to; it is made again only where what it shows has changed.
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

/** Which of the elements that can have the focus has it; -1: none in here. @param {Element} element */
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
