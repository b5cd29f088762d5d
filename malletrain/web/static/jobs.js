// All jobs, as a table that can be filtered and sorted.

import { seen } from "./daemon.js";
import { breakable, h, link, replace } from "./dom.js";
import { ENDED, count, duration, measured, moment, natural, number, rate, sizes } from "./words.js";

const FILTERS = [["", "all"], ["unfinished", "not ended"], ["running", "running"], ["waiting", "waiting"],
  ["completed", "completed"], ["failed", "failed"], ["cancelled", "cancelled"]];
const COLUMNS = [
  ["id", "Job", (job) => job.id, (job) => link(`job/${job.id}`, job.id)],
  ["name", "Name", (job) => job.name, (job) => link(`job/${job.id}`, breakable(job.name)), "name"],
  ["state", "State", (job) => job.state, (job) => [h("span", { class: `state ${job.state}` }, job.state),
    job.reason && h("small", { class: "reason" }, job.reason)], "standing"],
  ["nodes", "Nodes", (job) => job.nodes.length, (job) => `${job.nodes.length || "-"} of ${sizes(job)}`, "number"],
  ["rate", "Samples/s", (job) => job.rate, (job) => rate(job.rate), "number"],
  ["took", "Time", (job) => took(job), (job) => duration(took(job)), "number"],
  ["owner", "Owner", (job) => job.owner, (job) => breakable(job.owner), "name wide"],
  ["samples", "Samples", (job) => job.samples, (job) => worked(job), "number wide"],
  ["rescales", "Rescales", (job) => job.rescales, (job) => job.rescales, "number wide"],
  ["age", "Submitted", (job) => job.submitted, (job) => moment(job.submitted), "wide"],
  ["metrics", "Metrics", (job) => metrics(job), (job) => metrics(job), "wide"],
];
const MORE = 200;
// Persists while other pages are shown.
const viewState = { text: "", filter: "", mine: false, sort: "id", down: true, shown: MORE };

const worked = (job) => (job.mode === "farm" ? `${count(job.samples)} tasks` : count(job.samples));
const took = (job) => (job.started ? (job.ended ?? seen.machine.status.now) - job.started : null);
const metrics = (job) => Object.entries(job.metrics).map(([name, value]) => `${name} ${measured(value)}`).join(", ");

function fits(job) {
  if (viewState.filter === "unfinished" && ENDED.has(job.state)) return false;
  if (viewState.filter === "running" && !job.nodes.length) return false;
  if (viewState.filter === "waiting" && (ENDED.has(job.state) || job.nodes.length)) return false;
  if (ENDED.has(viewState.filter) && job.state !== viewState.filter) return false;
  if (viewState.mine && job.owner !== seen.machine.user) return false;
  return !viewState.text || `${job.id} ${job.name} ${job.owner}`.toLowerCase().includes(viewState.text.toLowerCase());
}

function compare(a, b) {
  const key = COLUMNS.find(([name]) => name === viewState.sort)[2];
  const [x, y] = [key(a), key(b)];
  const order = typeof x === "number" && typeof y === "number" ? x - y : natural(x ?? "", y ?? "");
  return viewState.down ? -order : order;
}

export function jobs(main) {
  const rows = new Map();
  const body = h("tbody", {});
  const head = h("tr", {});
  const summary = h("p", { role: "status", id: "matches" });
  const more = h("button", { type: "button", hidden: true, onclick: () => { viewState.shown += MORE; update(); } }, "Show more");
  const changed = () => { viewState.shown = MORE; update(); };
  replace(main, h("h1", {}, "Jobs"),
    h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      h("label", {}, "Search ", h("input", { type: "search", id: "search", value: viewState.text,
        oninput: (event) => { viewState.text = event.target.value; changed(); } })),
      h("label", {}, "State ", h("select", { id: "filter", onchange: (event) => { viewState.filter = event.target.value; changed(); } },
        FILTERS.map(([value, name]) => h("option", { value, selected: value === viewState.filter }, name)))),
      h("label", {}, h("input", { type: "checkbox", id: "mine", checked: viewState.mine,
        onchange: (event) => { viewState.mine = event.target.checked; changed(); } }), " mine only")),
    summary,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Jobs" },
      h("table", { id: "jobs" }, h("caption", { class: "unseen" }, "Jobs"), h("thead", {}, head), body)), more);

  function titles() {
    replace(head, COLUMNS.map(([name, title, , , kind]) => h("th", { scope: "col", class: kind,
      "aria-sort": viewState.sort === name ? (viewState.down ? "descending" : "ascending") : null },
      h("button", { type: "button", onclick: (event) => {
        viewState.down = viewState.sort === name ? !viewState.down : true;
        viewState.sort = name;
        const here = [...head.querySelectorAll("button")].indexOf(event.target);
        titles();
        head.querySelectorAll("button")[here].focus();
        update();
      } }, title))));
  }

  function row(job) {
    const cells = COLUMNS.map(([, , , cell, kind]) => h("td", { class: kind }, cell(job)));
    return h("tr", { "data-job": job.id }, cells);
  }

  function update() {
    const matches = [...seen.jobs.values()].filter(fits).sort(compare);
    const shown = matches.slice(0, viewState.shown);
    summary.textContent = `${matches.length} of ${seen.jobs.size} jobs`;
    more.hidden = matches.length <= shown.length;
    const newRows = new Map();
    for (const job of shown) {
      // Only changed rows are replaced, so that focus and selection stay.
      const before = rows.get(job.id);
      const key = `${JSON.stringify(job)}${job.ended || !job.started ? "" : seen.machine.status.now}`;
      newRows.set(job.id, before?.key === key ? before : { key, element: refreshed(before, job) });
    }
    rows.clear();
    for (const [id, each] of newRows) rows.set(id, each);
    const elements = [...newRows.values()].map((each) => each.element);
    if (elements.length !== body.children.length || elements.some((each, k) => each !== body.children[k])) {
      body.replaceChildren(...elements);
    }
    hideEmpty();
  }

  /** Hides the columns in which no job has anything. */
  function hideEmpty() {
    for (const [k, each] of [...head.cells].entries()) {
      const empty = body.rows.length > 0 && [...body.rows].every((row) => !row.cells[k].textContent);
      each.hidden = empty;
      for (const row of body.rows) row.cells[k].hidden = empty;
    }
  }

  function refreshed(before, job) {
    const made = row(job);
    if (!before) return made;
    [...before.element.cells].forEach((cell, k) => {
      if (cell.textContent !== made.cells[k].textContent) cell.replaceChildren(...made.cells[k].childNodes);
    });
    return before.element;
  }

  titles();
  return { update };
}
