// The nodes over time: a row for each node; for many nodes the number in each state.

import { picture, textWidth, timeAxis, widest } from "./charts.js";
import { h, s } from "./dom.js";
import { STATES, clock, duration, natural } from "./words.js";

const RIGHT = 12;
const AXIS = 22;
const ROW = 18;
const MOST_ROWS = 96;
const MOST_JOBS = 42; // as many as differ by colour or pattern
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
    const many = rows.length > MOST_ROWS;
    const jobs = this.jobsIn(rows, since);
    return picture(label, (width) => {
      const body = many ? this.counts(rows, since, width) : this.rows(rows, since, names, width);
      return { height: body.height + AXIS, parts: [patterns(), body.parts,
        timeAxis(since, this.now, body.left, width - RIGHT, body.height + AXIS - 6)] };
    }, [
      ...jobLabels(jobs.slice(0, MOST_JOBS), names).map(([job, name]) => [swatch(job), name]),
      ...(jobs.length > MOST_JOBS ? [["", `and ${jobs.length - MOST_JOBS} more jobs`]] : []),
      ...ORDER.filter((state) => state !== "job" || many).map((state) => [h("i", { class: `key node-${state}` }), STATES[state]]),
      ["", "▼ taken back, with notice"], ["", "✕ lost without"],
    ]);
  }

  /** Returns the jobs that had nodes in this time, the newest first. */
  jobsIn(rows, since) {
    if (rows.length > MOST_ROWS) return [];
    const seen = rows.flatMap(([, spans]) => spans).filter((span) => span.job && (span.end ?? this.now) > since);
    return [...new Set(seen.map((span) => span.job))].sort((a, b) => natural(b, a));
  }

  /** Returns the place of a time between `left` and `right`. */
  x(time, since, left, right) {
    const share = (time - since) / (this.now - since);
    return left + Math.min(1, Math.max(0, share)) * (right - left);
  }

  rows(rows, since, names, width) {
    const parts = [];
    const left = Math.ceil(widest(rows.map(([node]) => node))) + 12;
    const x = (time) => this.x(time, since, left, width - RIGHT);
    rows.forEach(([node, spans], k) => {
      const y = k * ROW;
      parts.push(s("text", { x: left - 8, y: y + 13, "text-anchor": "end" }, node),
        s("rect", { class: "node-busy", x: left, y: y + 2, width: width - RIGHT - left, height: ROW - 4 }));
      for (const span of spans) {
        const end = span.end ?? this.now;
        if (end <= since) continue;
        const from = x(span.start);
        const size = Math.max(0.5, x(end) - from);
        const job = names.get(span.job) ?? span.job;
        const area = { x: from, y: y + 2, width: size, height: ROW - 4 };
        const title = s("title", {}, `${node}: ${STATES[span.state] ?? span.state}${job ? ` ${job}` : ""}, ${clock(span.start)} to ${span.end ? clock(span.end) : "now"}`);
        if (span.state === "job") parts.push(...jobArea(span.job, area, title), jobName(span.job, area));
        else parts.push(s("rect", { class: `node-${span.state}`, ...area }, title));
      }
      for (const mark of this.marks) {
        if (mark.node !== node || mark.time < since) continue;
        parts.push(s("text", { class: "taken", x: x(mark.time), y: y + 14, "text-anchor": "middle" },
          mark.notice ? "▼" : "✕", s("title", {}, `${node} was taken back at ${clock(mark.time)}${mark.notice ? "" : " without notice"}`)));
      }
    });
    return { parts, height: rows.length * ROW, left };
  }

  counts(rows, since, width) {
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
    const label = `${most} nodes`;
    const left = Math.ceil(textWidth(label)) + 12;
    const below = new Float64Array(steps);
    const parts = counts.map((each, state) => {
      const edge = (values) => Array.from(values, (value, k) =>
        `${(left + (k / (steps - 1)) * (width - RIGHT - left)).toFixed(1)} ${(height - (value / most) * height).toFixed(1)}`);
      const bottom = edge(below);
      each.forEach((value, k) => { below[k] += value; });
      return s("path", { class: `node-${ORDER[state]}`, d: `M${edge(below).join("L")}L${bottom.reverse().join("L")}Z` });
    });
    parts.push(s("text", { x: left - 8, y: 12, "text-anchor": "end" }, label));
    return { parts, height, left };
  }
}

/** Returns [job, name] pairs. A name that several jobs have is followed by the job's id. */
function jobLabels(jobs, names) {
  const called = jobs.map((job) => names.get(job) ?? job);
  return jobs.map((job, k) => [job, called.filter((name) => name === called[k]).length > 1 ? `${called[k]} (${job})` : called[k]]);
}

const COLOURS = 7;

/** Patterns of jobs whose colours are the same: the path of each in a square of SIZE pixels. The first has none. */
const PATTERNS = ["", "M-2 8L8 -2M2 12L12 2", "M2 -2L12 8M-2 2L8 12", "M3 0V10M8 0V10", "M0 3H10M0 8H10", "M5 0V10M0 5H10"];
const SIZE = 10;

/** Returns [colour, pattern] of a job. Consecutive jobs have different colours; then the pattern changes. */
export function jobCue(id) {
  const number = Number(String(id).replace(/\D/g, "")) || 0;
  return [number % COLOURS, Math.floor(number / COLOURS) % PATTERNS.length];
}

/** Returns what fills an area in the colour and the pattern of a job. */
function jobArea(id, area, title) {
  const [colour, pattern] = jobCue(id);
  const parts = [s("rect", { class: `node-job job${colour}`, ...area }, title)];
  if (pattern) parts.push(s("rect", { class: "pattern", fill: `url(#pattern${pattern})`, ...area }));
  return parts;
}

/** Returns the id of a job for its area; nothing if there is no room for it. */
function jobName(id, area) {
  return area.width > textWidth(id) + 8 && s("text", { class: "job-name", x: area.x + 4, y: area.y + 11 }, id);
}

/** Returns the definitions of the patterns. */
function patterns() {
  return s("defs", {}, PATTERNS.map((path, k) => k > 0 && s("pattern", { id: `pattern${k}`, width: SIZE, height: SIZE,
    patternUnits: "userSpaceOnUse" }, s("path", { class: "stripe", d: path }))));
}

const swatch = (id) => s("svg", { class: "key", viewBox: "0 0 12 12" }, jobArea(id, { x: 0, y: 0, width: 12, height: 12 }, false));
