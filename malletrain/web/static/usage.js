// Use of leased nodes, by user, month and class of nodes.

import { get } from "./daemon.js";
import { breakable, h, replace, table } from "./dom.js";
import { amount, count, nodeTime } from "./words.js";

const COLUMNS = [["Month", "whole"], ["User", "name"], ["Class", ""], ["Leased", "number"], ["Trained", "number"],
  ["Starts", "number"], ["Rescales", "number"], ["Preempted", "number"], ["No samples", "number"], ["No job", "number"],
  ["Samples", "number"], ["kWh", "number"]];
const CHARGES = [["Charged", "number"], ["GPU time", "number"]];
const SUMS = ["leased_nh", "trained_nh", "starting_nh", "rescaling_nh", "preempted_nh", "silent_nh", "unused_nh"];

export function usage(main) {
  const place = h("div", { id: "usage" }, h("p", {}, "Asking the daemon …"));
  replace(main, h("h1", {}, "Usage"),
    h("p", {}, "Time of nodes or slots by month, user and class. Charged: node-hours by the prices of kinds of slots. You see what you used; operators see everybody's."), place);
  load();

  async function load() {
    try {
      const rows = await get("usage");
      rows.sort((a, b) => b.month.localeCompare(a.month) || a.user.localeCompare(b.user));
      const slots = rows.some((row) => row.gpu_h !== null && row.gpu_h !== undefined);
      const columns = slots ? [...COLUMNS, ...CHARGES] : COLUMNS;
      replace(place, rows.length ? table("Usage", columns, rows.map((row) => [row.month, breakable(row.user), row.node_class,
        ...SUMS.map((name) => nodeTime(row[name])), count(row.samples), row.kwh === null ? "" : amount(row.kwh),
        ...(slots ? [nodeTime(row.charged_nh), typeof row.gpu_h === "number" ? nodeTime(row.gpu_h) : ""] : [])]))
        : h("p", { class: "none" }, "Nothing was leased yet."));
    } catch (error) {
      replace(place, h("p", { class: "none", role: "alert" }, error.message));
    }
  }
  return {};
}
