// @ts-check
// The proposals of the prefixes page: what each policy line would save, and a dialog that writes it.

import { openDialog } from "../dialog.js";
import { h } from "../dom.js";
import { counted, money, share, short } from "../format.js";
import { copyButton, diffOf, empty } from "../widgets.js";

/** @param {Record<string, string>} amounts by currency */
export function costs(amounts) {
  const texts = Object.entries(amounts).map(([currency, amount]) => money(amount, currency));
  return texts.join(" + ") || "unpriced";
}

/** @param {any} found @param {import("../api.js").Api} api @param {() => void} onDone */
export function proposalsOf(found, api, onDone) {
  if (!found.proposals.length)
    return empty("Nothing to change", "A replay of the sampled calls shows no policy line that would save tokens.");
  return [
    h(
      "p",
      { class: "dim" },
      `By a replay of ${counted(found.replayed_calls, "call")} with and without each line. As they were, the replay `,
      `has ${share(found.predicted_share, 1)} of their tokens cached; deployments reported `,
      `${share(found.reported_share, 1)}.`,
    ),
    h(
      "ol",
      { class: "findings" },
      found.proposals.map((/** @type {any} */ proposal) =>
        h(
          "li",
          null,
          h("h3", null, `tenant ${proposal.tenant}: `, proposal.models.join(", ")),
          h(
            "p",
            { class: "lost" },
            h("b", null, `${short(proposal.saved_tokens)} tokens`),
            ` (${share(proposal.saved_share, 1)}) and ${costs(proposal.saved_cost)} would be saved`,
          ),
          h(
            "div",
            { class: "fix" },
            h("pre", null, proposal.line),
            copyButton(proposal.line),
            h(
              "button",
              { type: "button", class: "quiet small", onclick: () => applyDialog(api, proposal, onDone) },
              "Apply …",
            ),
          ),
        ),
      ),
    ),
  ];
}

/**
 * Shows the change of the policy file, and writes it if that is confirmed.
 * @param {import("../api.js").Api} api @param {any} proposal @param {() => void} onDone
 */
async function applyDialog(api, proposal, onDone) {
  const body = { exceptions: [proposal.exception] };
  const path = "/admin/diagnosis/apply";
  /** @type {any} */
  let preview;
  try {
    preview = await api.send("POST", path, body);
  } catch (error) {
    const refusal = h("p", { class: "refusal", role: "alert" }, /** @type {Error} */ (error).message);
    return openDialog("The policy cannot be changed", [refusal], null, false, async () => null);
  }
  const fields = [
    h("p", null, `This changes ${preview.path}. Conversations that have begun keep their form.`),
    diffOf(preview.diff.split("\n")),
  ];
  openDialog("Change the policy?", fields, "Write and reload", false, async () => {
    const done = await api.send("POST", path, { ...body, file: preview.file });
    onDone();
    return h("p", { role: "status" }, `The policy ${done.policy} is written and in force.`);
  });
}
