// Use of leased nodes, by user, month and class of nodes.

import { get } from "./daemon.js";
import { h, replace, table } from "./dom.js";
import { amount, count, nodeTime } from "./words.js";

const COLUMNS = [["Month", ""], ["User", ""], ["Class", ""], ["Leased", "number"], ["Trained", "number"],
  ["Starts", "number"], ["Rescales", "number"], ["Preempted", "number"], ["No samples", "number"], ["No job", "number"],
  ["Samples", "number"], ["kWh", "number"]];
const SUMS = ["leased_nh", "trained_nh", "starting_nh", "rescaling_nh", "preempted_nh", "silent_nh", "unused_nh"];

export function usage(main) {
  const place = h("div", { id: "usage" }, h("p", {}, "Asking the daemon …"));
  replace(main, h("h1", {}, "Usage"),
    h("p", {}, "Time of nodes by month, user and class of nodes. You see what you used; operators see everybody's."), place);
  load();

  async function load() {
    try {
      const rows = await get("usage");
      rows.sort((a, b) => b.month.localeCompare(a.month) || a.user.localeCompare(b.user));
      replace(place, rows.length ? table("Usage", COLUMNS, rows.map((row) => [row.month, row.user, row.node_class,
        ...SUMS.map((name) => nodeTime(row[name])), count(row.samples), row.kwh === null ? "" : amount(row.kwh)]))
        : h("p", { class: "none" }, "Nothing was leased yet."));
    } catch (error) {
      replace(place, h("p", { class: "none", role: "alert" }, error.message));
    }
  }
  return {};
}
