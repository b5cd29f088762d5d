// The nodes over time: a row for each node; for many nodes the number in each state.

import { h, s } from "./dom.js";
import { STATES, clock, duration, natural } from "./words.js";

const WIDTH = 960;
const LEFT = 110;
const ROW = 18;
const MOST_ROWS = 96;
const WINDOW_S = 3600;
const ORDER = ["job", "leaving", "free", "leasing", "idle", "sick", "slow"];

/** The states of the nodes in the last hour, updated by changes. */
export class Timeline {
  constructor(view) {
    this.spans = new Map();
    this.marks = [...view.marks];
    this.now = view.now;
    for (const span of view.spans) this.of(span.node).push({ ...span });
  }

  of(node) {
    if (!this.spans.has(node)) this.spans.set(node, []);
    return this.spans.get(node);
  }

  set(node, state, job, time) {
    const spans = this.of(node);
    const last = spans.at(-1);
    if (last && last.end === null) {
      if (last.state === state && last.job === job) return;
      last.end = time;
    }
    if (state) spans.push({ node, state, job, start: time, end: null });
  }

  take(change) {
    const status = change.machine.status;
    if (!status) return;
    this.now = status.now;
    for (const node of change.nodes) this.set(node.node, node.state, node.job, status.now);
    for (const name of change.nodes_gone) this.set(name, "", "", status.now);
    for (const event of change.events) {
      if (event.kind === "node-leaving" || event.kind === "node-vanished") {
        this.marks.push({ node: event.node, time: event.time, notice: event.kind === "node-leaving" });
      }
    }
    const before = this.now - WINDOW_S;
    this.marks = this.marks.filter((mark) => mark.time >= before);
    for (const [node, spans] of this.spans) {
      const visible = spans.filter((span) => span.end === null || span.end >= before);
      if (visible.length) this.spans.set(node, visible);
      else this.spans.delete(node);
    }
  }

  /** Draws the last `seconds`. */
  draw(seconds, names) {
    const first = Math.min(...[...this.spans.values()].map((spans) => spans[0]?.start ?? Infinity));
    const since = Math.max(this.now - seconds, Math.min(first, this.now - 60));
    const rows = [...this.spans].filter(([, spans]) => spans.some((span) => (span.end ?? this.now) > since));
    rows.sort(([a], [b]) => natural(a, b));
    const label = `Nodes over the last ${duration(this.now - since)}`;
    if (!rows.length) return h("p", { class: "none" }, "No node has been idle or leased in this time.");
    const body = rows.length > MOST_ROWS ? this.counts(rows, since) : this.rows(rows, since, names);
    const height = body.height + 22;
    const axis = [0, 0.25, 0.5, 0.75, 1].map((share) =>
      s("text", { x: LEFT + share * (WIDTH - LEFT - 4), y: height - 6,
        "text-anchor": share === 1 ? "end" : share ? "middle" : "start" }, clock(since + share * (this.now - since))));
    return h("figure", { class: "timeline" },
      s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, body.parts, axis),
      h("figcaption", {}, label, h("span", { class: "legend" },
        jobLabels(this.jobsIn(rows, since), names).map(([job, name]) =>
          h("span", {}, h("i", { class: `key job${jobColour(job)}` }), name)),
        ORDER.filter((state) => state !== "job" || rows.length > MOST_ROWS).map((state) =>
          h("span", {}, h("i", { class: `key node-${state}` }), STATES[state])),
        h("span", {}, "▼ taken back, with notice"), h("span", {}, "✕ lost without"))));
  }

  /** Returns the jobs that had nodes in this time, the newest first; only a few of many. */
  jobsIn(rows, since) {
    if (rows.length > MOST_ROWS) return [];
    const seen = rows.flatMap(([, spans]) => spans).filter((span) => span.job && (span.end ?? this.now) > since);
    return [...new Set(seen.map((span) => span.job))].sort((a, b) => natural(b, a)).slice(0, 14);
  }

  x(time, since) {
    const share = (time - since) / (this.now - since);
    return LEFT + Math.min(1, Math.max(0, share)) * (WIDTH - LEFT - 4);
  }

  rows(rows, since, names) {
    const parts = [];
    rows.forEach(([node, spans], k) => {
      const y = k * ROW;
      parts.push(s("text", { x: LEFT - 8, y: y + 13, "text-anchor": "end" }, node),
        s("rect", { class: "node-busy", x: LEFT, y: y + 2, width: WIDTH - LEFT - 4, height: ROW - 4 }));
      for (const span of spans) {
        const end = span.end ?? this.now;
        if (end <= since) continue;
        const from = this.x(span.start, since);
        const job = names.get(span.job) ?? span.job;
        const style = span.state === "job" ? `node-job job${jobColour(span.job)}` : `node-${span.state}`;
        parts.push(s("rect", { class: style, x: from, y: y + 2, width: Math.max(0.5, this.x(end, since) - from),
          height: ROW - 4 }, s("title", {}, `${node}: ${STATES[span.state] ?? span.state}${job ? ` ${job}` : ""}, ${clock(span.start)} to ${span.end ? clock(span.end) : "now"}`)));
      }
      for (const mark of this.marks) {
        if (mark.node !== node || mark.time < since) continue;
        parts.push(s("text", { class: "taken", x: this.x(mark.time, since), y: y + 14, "text-anchor": "middle" },
          mark.notice ? "▼" : "✕", s("title", {}, `${node} was taken back at ${clock(mark.time)}${mark.notice ? "" : " without notice"}`)));
      }
    });
    return { parts, height: rows.length * ROW };
  }

  counts(rows, since) {
    const height = 240;
    const steps = 240;
    const counts = ORDER.map(() => new Float64Array(steps));
    for (const [, spans] of rows) {
      for (const span of spans) {
        const state = ORDER.indexOf(span.state);
        if (state < 0) continue;
        const index = (time) => Math.round(((time - since) / (this.now - since)) * steps);
        const last = Math.min(steps, index(span.end ?? this.now));
        for (let k = Math.max(0, index(span.start)); k < last; k += 1) counts[state][k] += 1;
      }
    }
    const most = Math.max(1, ...counts[0].map((_, k) => counts.reduce((sum, each) => sum + each[k], 0)));
    const below = new Float64Array(steps);
    const parts = counts.map((each, state) => {
      const edge = (values) => Array.from(values, (value, k) =>
        `${(LEFT + (k / (steps - 1)) * (WIDTH - LEFT - 4)).toFixed(1)} ${(height - (value / most) * height).toFixed(1)}`);
      const bottom = edge(below);
      each.forEach((value, k) => { below[k] += value; });
      return s("path", { class: `node-${ORDER[state]}`, d: `M${edge(below).join("L")}L${bottom.reverse().join("L")}Z` });
    });
    parts.push(s("text", { x: LEFT - 8, y: 12, "text-anchor": "end" }, `${most} nodes`));
    return { parts, height };
  }
}

/** Returns [job, name] pairs. A name that several jobs have is followed by the job's id. */
function jobLabels(jobs, names) {
  const called = jobs.map((job) => names.get(job) ?? job);
  return jobs.map((job, k) => [job, called.filter((name) => name === called[k]).length > 1 ? `${called[k]} (${job})` : called[k]]);
}

/** Returns the colour of a job. Jobs with consecutive ids have different colours. */
export const jobColour = (id) => (Number(String(id).replace(/\D/g, "")) || 0) % 7;
