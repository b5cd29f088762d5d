// The tasks of a farm: their counts, the counts over time, failed and slowest tasks.

import { get, jobPath, seen } from "./daemon.js";
import { chart } from "./charts.js";
import { h, replace, section, table } from "./dom.js";
import { duration, moment, rate } from "./words.js";

const ASK_EVERY_MS = 2000;
const MOST_FAILED = 100;
const STATES = ["done", "running", "waiting", "failed", "cancelled"];

/** Returns the values of a task as text; several with their names. */
function values(columns, task) {
  return columns.length === 1 ? task.values[0] : columns.map((name, k) => `${name}=${task.values[k]}`).join(" ");
}

/** Returns the last line of a text that has one. */
const lastLine = (text) => text.trimEnd().split("\n").at(-1).trim();

/** Returns for how long a task runs or ran. */
const ran = (task, now) => (task.started === null ? "" : duration(Math.max(0, (task.ended ?? now) - task.started)));

/** Creates the part of a job's page about its tasks. It is hidden until `look` is called with a farm. */
export function farm(id) {
  const places = Object.fromEntries(["counts", "failing", "picture", "failed", "slowest"].map((name) => [name, h("div", { id: `tasks-${name}` })]));
  const element = section("Tasks", places.counts, places.failing, places.picture, h("h3", {}, "Failed tasks"), places.failed,
    h("h3", {}, "Slowest tasks"), places.slowest);
  element.hidden = true;
  let timer = null;
  let over = false;
  let ended = null;

  async function ask() {
    const last = ended;
    try {
      const [view, history] = await Promise.all([
        get(jobPath(id, `/tasks?state=failed&limit=${MOST_FAILED}`)), get(jobPath(id, "/tasks/history"))]);
      if (over) return;
      draw(view, history);
      if (last) return; // nothing changes any more
    } catch (error) {
      if (over) return;
      if (error.refused || !places.counts.childElementCount) replace(places.counts, h("p", { class: "none", role: "alert" }, error.message));
      if (error.refused) return;
    }
    if (!over) askLater();
  }

  function askLater() {
    timer = setTimeout(() => (document.hidden ? askLater() : ask()), ASK_EVERY_MS);
  }

  function draw(view, history) {
    const now = seen.machine?.status?.now ?? Date.now() / 1000;
    const whole = (value) => value.toLocaleString("en");
    const numbers = [
      ...STATES.filter((state) => state !== "cancelled" || view.counts[state])
        .map((state) => [state, whole(view.counts[state] ?? 0), `of ${whole(view.total)} tasks`]),
      ...(ended ? [] : [["Rate", rate(view.rate) || "none", "tasks that ended lately"],
        ["Expected end", view.ends ? moment(view.ends) : "not known", view.ends ? `in ${duration(Math.max(0, view.ends - now))}` : "until tasks have ended"]]),
    ];
    replace(places.counts, h("dl", { class: "numbers" }, numbers.map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name.charAt(0).toUpperCase() + name.slice(1)), h("dd", {}, h("strong", {}, value), " ", h("small", {}, more))))));
    replace(places.failing, view.failing.map((sentence) => h("p", { class: "why" }, sentence)));
    const line = (name, index, style) => ({ name, style, points: history.points.map((point) => [point[0], point[index]]) });
    const seenAny = history.points.length > 0;
    replace(places.picture,
      chart("Tasks done and failed over time", { whole: true, lines: seenAny ? [line("done", 1, "done"), line("failed", 2, "failed")] : [] }),
      chart("Tasks running over time", { whole: true, height: 120, lines: seenAny ? [line("running", 3, "seen")] : [] }));
    const failed = view.tasks.map((task) => [task.number, values(view.columns, task), task.exit_code ?? "",
      task.tries, task.node, ran(task, now), lastLine(task.tail), task.log]);
    const more = view.counts.failed - failed.length;
    replace(places.failed, failed.length ? table("Failed tasks", [["Task", "number"], ["Values", ""], ["Exit", "number"], ["Tries", "number"],
      ["Node", ""], ["Time", "number"], ["Last line", ""], ["Log", ""]], failed) : h("p", { class: "none" }, "None."),
    more > 0 && h("p", { class: "none" }, `${whole(more)} more: malletrain tasks ${id} --failed`));
    const slowest = [...view.slowest.map((task) => [task, "running"]), ...history.slowest.map((task) => [task, task.state])]
      .map(([task, state]) => [task.number, values(view.columns, task), h("span", { class: `state ${state}` }, state), task.node, moment(task.started),
        ran(task, now), task.log]);
    replace(places.slowest, slowest.length ? table("Slowest tasks", [["Task", "number"], ["Values", ""], ["State", ""], ["Node", ""], ["Started", ""],
      ["Time", "number"], ["Log", ""]], slowest) : h("p", { class: "none" }, "None has run yet."));
  }

  /** Shows the tasks of a farm. `spec`: its specification, null for other jobs. `end`: when it ended, or null. */
  function look(spec, end) {
    if (!spec || over) return;
    const first = element.hidden;
    const news = end && !ended;
    ended = end;
    element.hidden = false;
    if (first || news) {
      clearTimeout(timer);
      ask();
    }
  }

  return { element, look, leave: () => { over = true; clearTimeout(timer); } };
}
