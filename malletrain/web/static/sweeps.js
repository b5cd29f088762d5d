// Sweeps and the trials of one, as in `malletrain sweep status` and `show`.

import { get } from "./daemon.js";
import { h, link, replace, table } from "./dom.js";
import { measured, nodeTime, number } from "./words.js";

const EVERY_MS = 5000;
const SWEEPS = [["Sweep", ""], ["Completed", "number"], ["Of", "number"], ["Running", "number"], ["Given up", "number"],
  ["Failed", "number"], ["Best", "number"], ["How it stands", ""]];
const TRIALS = [["Trial", "number"], ["State", ""], ["Job", ""], ["Values", ""], ["Step", "number"], ["Parameters", ""],
  ["Node time", "number"], ["Note", ""]];

const pairs = (values) => Object.entries(values).map(([name, value]) =>
  `${name} ${typeof value === "string" ? value : measured(value)}`).join(", ");

function stands(sweep) {
  if (sweep.sentence) return sweep.sentence;
  return sweep.attended ? "A process runs it." : `No process runs it. Resume it: malletrain sweep resume ${sweep.name}`;
}

const sweepRow = (sweep) => [link(`sweeps/${encodeURIComponent(sweep.name)}`, sweep.name),
  ...["complete", null, "running", "pruned", "fail"].map((state) => (state ? sweep.trials[state] ?? 0 : sweep.target_trials)),
  sweep.best === null ? "" : number(sweep.best), stands(sweep)];

const trialRow = (trial) => [`${trial.trial}${trial.best ? " (best)" : ""}`,
  h("span", { class: `state ${trial.state}` }, trial.state), trial.job ? link(`job/${trial.job}`, trial.job) : "",
  pairs(trial.values), trial.step ?? "", pairs(trial.parameters), nodeTime(trial.node_hours), trial.note];

export function sweeps(main, [name]) {
  const place = h("div", { id: "sweeps" }, h("p", {}, "Asking …"));
  replace(main, h("h1", {}, name ? `Sweep ${name}` : "Sweeps"),
    h("p", {}, name ? link("sweeps", "All sweeps") : "Your sweeps, kept where this page runs."), place);
  let shown = "";

  async function load() {
    try {
      const rows = await get(name ? `sweeps/${encodeURIComponent(name)}` : "sweeps");
      if (JSON.stringify(rows) !== shown) {
        shown = JSON.stringify(rows);
        replace(place, !rows.length ? h("p", { class: "none" }, name ? "It has no trials yet." : "There are none. Begin one with: malletrain sweep run FILE")
          : name ? table("Trials", TRIALS, rows.map(trialRow)) : table("Sweeps", SWEEPS, rows.map(sweepRow)));
      }
    } catch (error) {
      shown = "";
      replace(place, h("p", { class: "none", role: "alert" }, error.message));
    }
  }

  load();
  const timer = setInterval(() => document.hidden || load(), EVERY_MS);
  return { leave: () => clearInterval(timer) };
}
