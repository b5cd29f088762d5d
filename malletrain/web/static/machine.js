// The machine: the states of its nodes, the harvest, the last events.

import { get, seen } from "./daemon.js";
import { h, link, replace, section, table } from "./dom.js";
import { Timeline } from "./timeline.js";
import { count, duration, moment, nodeTime, problems, rate } from "./words.js";

const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const DRAW_EVERY_MS = 1000;
const MOST_MISSED = 60;

export function machine(main) {
  const numbers = h("dl", { class: "numbers" });
  const wrong = h("ul", { class: "problems", id: "problems", role: "status", hidden: true });
  const picture = h("div", { id: "timeline" });
  const events = h("ol", { class: "events", id: "events" });
  const choice = h("select", { id: "span", onchange: () => draw(true) },
    SPANS.map(([seconds, name]) => h("option", { value: seconds, selected: seconds === 900 }, name)));
  let timeline = null;
  let drawn = 0;
  let over = false;
  let missed = [];

  replace(main, h("h1", {}, "Machine"), wrong, numbers,
    section("Nodes", h("p", {}, h("label", { for: "span" }, "Show the last "), choice), picture),
    section("Main scheduler and networks", h("div", { id: "networks" })),
    section("What happened", events));
  load();

  async function load() {
    missed = [];
    try {
      const view = await get("timeline");
      if (over) return;
      timeline = new Timeline(view);
      // Changes during the request; the answer may include them or not.
      for (const change of missed) if (change.version > view.version) timeline.take(change);
      draw(true);
    } catch (error) {
      replace(picture, h("p", { class: "none" }, error.message));
    }
  }

  function draw(now) {
    if (!timeline || (!now && Date.now() - drawn < DRAW_EVERY_MS)) return;
    drawn = Date.now();
    const names = new Map([...seen.jobs.values()].map((job) => [job.id, job.name]));
    replace(picture, timeline.draw(Number(choice.value), names));
  }

  function update(change) {
    const { status, harvest } = seen.machine;
    if (!status) return;
    if (change?.full) {
      load();
    } else if (change) {
      missed = [...missed, change].slice(-MOST_MISSED);
      timeline?.take(change);
    }
    const waiting = [...seen.jobs.values()].filter((job) => !job.ended && !job.nodes.length).length;
    const shown = [
      ["Idle", status.nodes_idle, "nodes nobody uses"],
      ["Leased", status.nodes_leased, "held by MalleTrain"],
      ["Training", status.nodes_training, "of the leased nodes"],
      ...(status.nodes_farming ? [["Running tasks", status.nodes_farming, "of the leased nodes"]] : []),
      ["Throughput", rate(status.rate) || "none", "all jobs together"],
      ["Harvest today", harvest ? `${nodeTime(harvest.trained_nh)} of nodes` : "…",
        harvest ? `trained, of ${nodeTime(harvest.leased_nh)} leased (UTC)` : ""],
      ["Waiting", waiting, "jobs without nodes"],
      ["Rescales", status.rescales, `${status.preemptions} nodes taken back`],
      ["Samples", count(status.samples), `since ${moment(status.started)} the daemon runs`],
    ];
    replace(numbers, shown.map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, h("strong", {}, value), " ", h("small", {}, more)))));
    const sentences = problems(status);
    wrong.hidden = !sentences.length;
    if (wrong.textContent !== sentences.join("")) replace(wrong, sentences.map((each) => h("li", {}, each)));
    draw(false);
    const names = new Map([...seen.jobs.values()].map((job) => [job.id, job.name]));
    const newest = seen.events.slice(-40).reverse();
    if (!change || change.events.length || change.full) {
      replace(events, newest.map((event) => h("li", {}, h("time", {}, moment(event.time)), " ",
        h("b", {}, event.kind), " ", event.job ? [link(`job/${event.job}`, names.get(event.job) ?? event.job), " "] : "",
        event.node ? `${event.node} ` : "", event.sentence)));
    }
    const networks = document.getElementById("networks");
    const poll = status.poll_error || (status.last_poll ? `The main scheduler was asked ${duration(Math.max(0, status.now - status.last_poll))} ago.` : "");
    replace(networks, h("p", {}, poll),
      status.networks.length ? table("Networks between nodes", [["Class", ""], ["Speed", ""]],
        status.networks.map((each) => [each.node_class, each.sentence])) : "");
  }

  return { update, leave: () => { over = true; } };
}
