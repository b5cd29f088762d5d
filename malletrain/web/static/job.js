// One job: its progress, why it waits, the cost of its rescales, its output.

import { get, jobPath, onchange, seen, send } from "./daemon.js";
import { bars, chart, shares } from "./charts.js";
import { h, replace, section, table } from "./dom.js";
import { farm } from "./farm.js";
import { logs } from "./logs.js";
import { CAUSES, ENDED, PARTS, STANDS, clock, count, duration, hosts, measured, moment, number, rate, sizes } from "./words.js";

const ASK_EVERY_MS = 2000;

export function job(main, [id = ""]) {
  const places = Object.fromEntries(["facts", "why", "steer", "scale", "rate", "steps", "curve", "costs", "metrics", "notices"]
    .map((name) => [name, h("div", { id: `job-${name}` })]));
  const title = h("h1", {}, id);
  const log = logs(id);
  const tasks = farm(id);
  let detail = null;
  let history = null;
  let series = [];
  let requestTime = 0;
  let asking = false;
  let over = false;
  let previous = "";
  // The tasks of a farm depend on nothing but their own node: it has no scaling curve, no pauses and no metrics.
  const ofTrainings = [section("Throughput", places.rate), section("A step", places.steps),
    section("Scaling", places.curve), section("Rescales", places.costs), section("Metrics", places.metrics)];
  replace(main, title, places.why, places.facts, places.steer, tasks.element, section("Scale", places.scale), ofTrainings,
    section("Notices", places.notices), section("Log", log.element));
  ask();

  async function ask() {
    if (asking || over) return;
    asking = true;
    requestTime = Date.now();
    try {
      // Metrics of other users' jobs are refused; the other parts of their jobs are shown.
      [detail, history, series] = await Promise.all([get(jobPath(id)), get(jobPath(id, "/history")),
        get(jobPath(id, "/metrics")).catch(() => [])]);
      if (!over) draw();
    } catch (error) {
      if (!detail && !over) replace(places.why, h("p", { class: "none", role: "alert" }, error.message));
    }
    asking = false;
  }

  function update(change) {
    const now = seen.jobs.get(detail?.job.id ?? id);
    // The view of an ended job no longer changes.
    const news = !now || JSON.stringify(now) !== previous || !ENDED.has(now.state);
    previous = JSON.stringify(now);
    if (news && Date.now() - requestTime >= ASK_EVERY_MS) ask();
    else if (now && detail) facts({ ...detail, job: now });
    log.look(now?.ended);
  }

  function facts({ job, spec }) {
    title.textContent = `${job.name} (${job.id})`;
    const rows = [
      ["State", h("span", { class: `state ${job.state}` }, job.state)],
      ["Owner", job.owner],
      ["Nodes", `${job.nodes.length} of ${sizes(job)}${job.nodes.length ? `: ${hosts(job.nodes)}` : ""}`],
      ["Throughput", rate(job.rate) || "none"],
      [spec.farm ? "Tasks done" : "Samples", count(job.samples)],
      ["Rescales", job.rescales],
      ["Submitted", moment(job.submitted)],
      ["Ran", job.started ? duration((job.ended ?? seen.machine.status.now) - job.started) : "not yet"],
      spec.farm ? ["Command", (spec.farm.command ?? []).join(" "), "wide"]
        : ["Script", [spec.script, ...(spec.args ?? [])].join(" "), "wide"],
      ...links(spec.links ?? {}),
      ["Network", detail.network, "wide"], ["Memory", detail.memory, "wide"],
    ];
    replace(places.facts, h("dl", { class: "facts" }, rows.filter(([, value]) => value !== "").map(([name, value, kind]) =>
      h("div", { class: kind }, h("dt", {}, name), h("dd", {}, value)))));
    const waits = !job.nodes.length && !ENDED.has(job.state);
    replace(places.why,
      waits && h("p", { class: "why" }, h("b", {}, "Why it waits: "), job.reason || "it was only just submitted", "."),
      !waits && job.reason && !(detail.failure ?? "").includes(job.reason) && h("p", { class: "why" }, `${job.reason}.`),
      detail.failure && h("pre", { class: "failure" }, detail.failure));
  }

  // The daemon takes addresses of web pages only; a link to anything else would run as a script of this page.
  const links = (addresses) => Object.entries(addresses).filter(([, url]) => /^https?:\/\//i.test(url)).sort().map(([name, url]) =>
    [name, h("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, url), "wide"]);

  function draw() {
    tasks.look(detail.spec.farm, detail.job.ended);
    for (const each of ofTrainings) each.hidden = Boolean(detail.spec.farm);
    facts(detail);
    steer();
    scale();
    notices();
    if (detail.spec.farm) return;
    throughput();
    steps();
    curve();
    costs();
    replace(places.metrics, series.length ? series.map((each) => {
      const points = each.times.map((time, k) => [time, each.values[k], pointLabel(each, k)]).filter(([, value]) => value !== null);
      return chart(`${each.name}: ${measured(each.values.at(-1))} at last`, { lines: [{ points, style: "seen", dots: points.length <= 60 }], height: 140 });
    }) : h("p", { class: "none" }, "The script has reported none (malletrain.metric)."));
  }

  function notices() {
    replace(places.notices, detail.notices.length ? h("ul", {}, detail.notices.map((notice) => h("li", {}, notice)))
      : h("p", { class: "none" }, "None."));
  }

  const pointLabel = (each, k) => `${measured(each.values[k])} at ${clock(each.times[k])}, ${count(each.samples[k])} samples${
    each.steps[k] === null ? "" : `, step ${each.steps[k]}`}${each.nodes[k] ? `, ${each.nodes[k]} nodes` : ""}`;

  const end = () => detail.job.ended ?? seen.machine?.status?.now ?? Date.now() / 1000;

  function scale() {
    const { rescales, job } = detail;
    // The history since the start of the page is finer, because suspensions are not rescales.
    const watched = history.points.map(([time, , nodes]) => [time, nodes]);
    if (!rescales.length && !watched.length) {
      replace(places.scale, h("p", { class: "none" }, ENDED.has(job.state)
        ? "It ended before its first sample." : "It has not had nodes yet, or its first sample is still to come."));
      return;
    }
    const before = rescales.filter((each) => each.began < (watched[0]?.[0] ?? Infinity));
    const points = [...before.map((each) => [each.began, each.to_nodes]), ...watched];
    if (!ENDED.has(job.state)) points.push([end(), job.nodes.length]);
    const marks = rescales.map((each) => ({ x: each.began, style: `cause-${each.kind}`,
      text: `${clock(each.began)}: ${each.from_nodes} → ${each.to_nodes} nodes, ${CAUSES[each.kind] ?? each.kind}` }));
    const causes = [...new Set(rescales.map((each) => each.kind))];
    replace(places.scale, chart("Nodes over time", { lines: [{ points, style: "seen", stepped: true }], marks, height: 160, whole: true,
      legend: causes.map((kind) => [`cause-${kind}`, CAUSES[kind] ?? kind]) }));
  }

  function throughput() {
    const expected = new Map((detail.profile?.points ?? []).map((point) => [point.nodes, point.rate]));
    const lines = [{ name: "seen", points: history.points.map(([time, value]) => [time, value]), style: "seen" }];
    const predicted = history.points.filter(([, , nodes]) => expected.has(nodes)).map(([time, , nodes]) => [time, expected.get(nodes)]);
    if (predicted.length) lines.push({ name: "predicted by the scaling curve", points: predicted, style: "expected", stepped: true });
    replace(places.rate, chart("Samples/s over time, since this page is served", { lines, height: 160 }));
  }

  function steps() {
    const names = history.parts.map((part) => PARTS[part] ?? part);
    const { layout } = detail;
    const tried = layout?.tried.filter((each) => each.rate !== null) ?? [];
    replace(places.steps, layout && h("p", {}, `Each node: ${layout.layout}. ${layout.sentence}`),
      tried.length ? table("Layouts of a node", [["Processes", "number"], ["Threads", "number"], ["Loader workers", "number"], ["Samples/s", "number"], ["Result", ""]],
        tried.map((each) => [each.processes, each.threads, each.loader_workers, rate(each.rate), each.result])) : "",
      detail.steps && h("p", {}, detail.steps.advice),
      history.steps.length ? shares("Share of a step over time, since this page is served", history.steps, names)
        : h("p", { class: "none" }, "Not measured yet."));
  }

  function curve() {
    const { profile, rates } = detail;
    const points = profile?.points ?? [];
    const lines = [];
    if (points.length) {
      lines.push({ name: "expected, with 95 %", points: points.map((p) => [p.nodes, p.rate]), style: "expected",
        band: points.map((p) => [p.nodes, Math.max(0, p.rate - (p.spread ?? 0)), p.rate + (p.spread ?? 0)]) });
      lines.push({ name: "measured", points: points.filter((p) => p.measured).map((p) => [p.nodes, p.rate]), style: "measured", onlyDots: true });
    }
    if (rates.length) lines.push({ name: "seen", points: rates.map((r) => [r.nodes, r.rate]), style: "seen", onlyDots: true });
    const seenAt = new Map(rates.map((r) => [r.nodes, r]));
    const all = [...new Set([...points.map((p) => p.nodes), ...seenAt.keys()])].sort((a, b) => a - b);
    const at = new Map(points.map((p) => [p.nodes, p]));
    replace(places.curve, profile && h("p", {}, `It is ${STANDS[profile.state] ?? profile.state}. ${profile.sentence}`),
      lines.length ? chart("Samples/s by number of nodes", { lines, time: false, height: 220 }) : h("p", { class: "none" }, "Nothing is known yet."),
      all.length ? table("Scaling curve", [["Nodes", "number"], ["Expected", "number"], ["Give or take", "number"], ["From", ""], ["Seen", "number"]],
        all.map((k) => [k, rate(at.get(k)?.rate), at.get(k) ? rate(at.get(k).spread) : "", at.has(k) ? (at.get(k).measured ? "measured" : "estimated") : "", rate(seenAt.get(k)?.rate)])) : "");
  }

  function costs() {
    const over = detail.rescales.filter((each) => each.cost_s !== null);
    const order = [...new Set(over.flatMap((each) => Object.keys(each.phases)))];
    const newest = over.slice(-20);
    replace(places.costs, newest.length ? bars("Pauses by phase", newest.map((each) => ({
      name: `${each.from_nodes} → ${each.to_nodes} ${CAUSES[each.kind] ?? each.kind}`, parts: Object.entries(each.phases) })), order) : "",
    over.length ? table("Rescales", [["Time", ""], ["Nodes", ""], ["Cause", ""], ["Pause", "number"], ...order.map((part) => [part, "number"])],
      [...over].reverse().map((each) => [moment(each.began), `${each.from_nodes} → ${each.to_nodes}`, CAUSES[each.kind] ?? each.kind,
        duration(each.cost_s), ...order.map((part) => (part in each.phases ? duration(each.phases[part]) : ""))]))
      : h("p", { class: "none" }, "None yet."));
  }

  function steer() {
    const { job } = detail;
    if (ENDED.has(job.state) || places.steer.childElementCount) {
      if (ENDED.has(job.state)) replace(places.steer);
      return;
    }
    const outcome = h("p", { role: "status", id: "steered" });
    const act = async (what) => {
      try {
        outcome.textContent = (await what()).sentence;
        ask();
      } catch (error) {
        outcome.textContent = error.message;
      }
    };
    const sure = h("dialog", { id: "sure", "aria-labelledby": "sure-text" },
      h("p", { id: "sure-text" }, `Cancel ${job.name}? Its processes are stopped and its nodes freed; snapshots and logs stay.`),
      h("form", { method: "dialog" },
        h("button", { id: "cancel-yes", onclick: () => act(() => send("POST", jobPath(job.id, "/cancel"))) }, "Cancel the job"),
        h("button", { autofocus: true }, "Leave it")));
    const [low, high] = ["min_nodes", "max_nodes"].map((name) =>
      h("input", { type: "number", min: 1, name, value: job[name], "aria-label": name === "min_nodes" ? "fewest nodes" : "most nodes", required: true }));
    replace(places.steer, h("form", { class: "steer", onsubmit: (event) => {
      event.preventDefault();
      act(() => send("PUT", jobPath(job.id, "/scale"), { min_nodes: Number(low.value), max_nodes: Number(high.value) }));
    } }, h("button", { type: "button", id: "cancel", onclick: () => sure.showModal() }, "Cancel …"),
    h("span", {}, "Nodes from ", low, " to ", high, " ", h("button", { id: "rescale" }, "Change"))), sure, outcome);
  }

  const stop = onchange((change) => change && log.look(detail?.job.ended));
  return { update, leave: () => { over = true; stop(); log.leave(); tasks.leave(); } };
}
