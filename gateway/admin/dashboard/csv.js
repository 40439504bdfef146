// @ts-check
// Tables as CSV files (RFC 4180).

import { h } from "./dom.js";

/** @typedef {string | number | null | undefined} Cell */

/** @param {Cell[][]} rows the first one has the names of the columns */
export function csvOf(rows) {
  return rows.map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

/**
 * Spreadsheets run text that begins with one of these signs as a formula, and names may come from clients.
 * @param {Cell} cell
 */
function field(cell) {
  if (cell === null || cell === undefined) return "";
  if (typeof cell === "number") return String(cell);
  const text = /^[=+\-@\t\r]/.test(cell) ? `'${cell}` : cell;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** @param {string} name of the file, without suffix @param {Cell[][]} rows */
export function downloadCsv(name, rows) {
  const url = URL.createObjectURL(new Blob([csvOf(rows)], { type: "text/csv" }));
  const day = new Date().toISOString().slice(0, 10);
  h("a", { href: url, download: `warmpath-${name}-${day}.csv` }).click();
  URL.revokeObjectURL(url);
}
