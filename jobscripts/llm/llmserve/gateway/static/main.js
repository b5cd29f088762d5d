// Asks the gateway for what the user of a key may see, and shows it.

import { h, section, show, table } from "./dom.js";
import { amount, count, duration, latency, moment } from "./words.js";

const ASK_EVERY_MS = 2000;
const KEY = "llmserve-key";
const STATES = ["ready", "loading", "draining", "failed", "gone"];

const place = (name) => document.getElementById(name);
let timer = 0;
let turn = 0;
let seenAt = 0;

async function ask() {
  clearTimeout(timer);
  const own = (turn += 1);  // a later call replaces this one
  const key = sessionStorage.getItem(KEY);
  if (!key) return login("");
  let problem = "";
  try {
    const answer = await fetch("page/overview", { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" });
    const data = await answer.json();
    if (own !== turn) return;
    if (answer.status === 401) {
      sessionStorage.removeItem(KEY);
      return login(data.error.message);
    }
    if (answer.ok) draw(data);
    else problem = data.error.message;
  } catch {
    if (own !== turn) return;
    problem = "No answer from the gateway; trying again …";
  }
  away(problem);
  if (!document.hidden) timer = setTimeout(ask, ASK_EVERY_MS);
}

function away(problem) {
  const text = problem && seenAt ? `${problem} What you see is of ${new Date(seenAt).toLocaleTimeString()}.` : problem;
  if (place("away").textContent !== text) place("away").textContent = text;
  place("away").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

function login(refusal) {
  seenAt = 0;
  away("");
  for (const name of ["models", "users", "batches", "errors"]) show(place(name), null, () => "");
  place("who").textContent = "";
  place("leave").hidden = place("content").hidden = true;
  place("login").hidden = false;
  place("refusal").hidden = !refusal;
  place("refusal").textContent = refusal;
  place("key").value = "";
  place("key").focus();
}

function draw(data) {
  seenAt = Date.now();
  place("login").hidden = true;
  place("leave").hidden = place("content").hidden = false;
  const who = `${data.user}${data.operator ? " (operator)" : ""}; policy ${data.policy}; gateway up for ${duration(data.now - data.started)}`;
  if (place("who").textContent !== who) place("who").textContent = who;
  show(place("models"), data.models, (models) => models.map(model));
  show(place("users"), [data.operator, data.users], ([operator, users]) => people(operator, users));
  show(place("batches"), [data.operator, data.batches], ([operator, batches]) => lists(operator, batches));
  show(place("errors"), [data.operator, data.errors.map((each) => ({ ...each, ago_s: duration(each.ago_s) }))],
    ([operator, errors]) => operator && failures(errors));
}

const tile = (name, value, more = "", kind = null) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, h("strong", {}, value), more && h("small", { class: kind }, more)));

const state = (name) => h("span", { class: `state ${name}` }, name.replace("_", " "));

function model(each) {
  const { latencies } = each;
  const states = STATES.filter((name) => each.states[name]).map((name) => `${each.states[name]} ${name}`);
  const others = states.filter((text) => !text.endsWith("ready"));
  const asks = each.node_demand === null ? "" : `asks for ${amount(each.node_demand, "node")}`;
  return h("section", { class: "model" },
    h("h2", {}, each.name, each.job && h("small", {}, `service ${each.job}`)),
    each.states.ready ? "" : h("p", { class: "why" }, waits(each)),
    h("dl", { class: "numbers" },
      tile("Replicas ready", each.states.ready ?? 0, [...others, asks].filter(Boolean).join("; "), each.states.failed ? "failure" : null),
      tile("Requests running", each.running, each.slots ? `of ${count(each.slots)} at once` : ""),
      tile("Requests waiting", count(each.queued), each.backlog ? `and ${amount(each.backlog, "line")} of batches` : ""),
      tile("Tokens/s", count(each.tokens_per_s < 10 ? each.tokens_per_s : Math.round(each.tokens_per_s)), "mean of 30 s"),
      tile("First token", latency(latencies.ttft_p50_s) || "none", latencies.answers ? `p99 ${latency(latencies.ttft_p99_s)}` : "in the last 5 min"),
      tile("Each further token", latency(latencies.token_p50_s) || "none", latencies.token_p99_s === null ? "in the last 5 min" : `p99 ${latency(latencies.token_p99_s)}`),
      tile("Moves", count(each.moves), each.losses ? `and ${count(each.losses)} after the loss of a node` : "to other nodes")),
    each.replicas.length ? table(`Replicas of ${each.name}`,
      [["Node", "name"], ["State", ""], ["Running", "number"], ["Loaded in", "number"], ["Address", "whole"], ["Problem", "text"]],
      each.replicas.map((one) => [one.name === one.address ? "" : one.name, state(one.state),
        one.slots ? `${one.running} of ${one.slots}` : "", one.load_s === null ? "" : duration(one.load_s), one.address,
        one.sentence && h("div", { class: "tail" }, one.sentence)])) : "");
}

function waits(each) {
  if (each.states.loading) return "No replica is ready; one is loading. Requests wait for it.";
  if (each.node_demand === null) return "No engine answers. Requests wait.";
  if (each.node_demand) return `No replica is ready. Requests wait until the gateway gets one of the ${amount(each.node_demand, "node")} that it asks for.`;
  return "There are no requests, so no node is asked for. The first request gets one.";
}

/** Formats the median and the 99th percentile of a latency. */
const both = (p50, p99) => (p50 === null ? "" : `${latency(p50)}, p99 ${latency(p99)}`);

function people(operator, users) {
  const limits = (refused) => Object.entries(refused).map(([limit, number]) => `${count(number)} by ${limit.replaceAll("_", " ")}`).join(", ");
  return section(operator ? "Users" : "Your requests", users.length ? table(operator ? "Users" : "Your requests",
    [["User", "name"], ["Waiting", "number"], ["Running", "number"], ["Answered", "number"], ["Failed", "number"], ["Cancelled", "number"],
      ["Refused", ""], ["Tokens in", "number"], ["Tokens out", "number"], ["First token", "number"], ["Further token", "number"]],
    users.map((each) => [operator ? each.name : "", each.queued, each.running, count(each.done), each.failed ? count(each.failed) : "",
      each.cancelled ? count(each.cancelled) : "", limits(each.refused), count(each.prompt_tokens), count(each.generated_tokens),
      both(each.latencies.ttft_p50_s, each.latencies.ttft_p99_s), both(each.latencies.token_p50_s, each.latencies.token_p99_s)]))
    : h("p", { class: "none" }, "No requests yet."),
  h("p", { class: "none" }, "Counts are since the start of the gateway; latencies are of the last 5 minutes."));
}

function lists(operator, batches) {
  return section(operator ? "Batches" : "Your batches", batches.length ? table("Batches",
    [["Batch", "name"], ["User", "name"], ["State", ""], ["Progress", "whole"], ["Failed lines", "number"], ["Created", "whole"], ["Ended", "whole"]],
    batches.map((each) => [h("span", { title: each.id }, each.id), operator ? each.user : "", state(each.status),
      [h("progress", { max: each.total, value: each.completed + each.failed, "aria-label": "lines answered" }),
        ` ${count(each.completed + each.failed)} of ${count(each.total)}`],
      each.failed || "", moment(each.created), each.ended === null ? "" : moment(each.ended)]))
    : h("p", { class: "none" }, "None yet."));
}

function failures(errors) {
  return section("Errors of replicas", errors.length ? h("ul", { class: "events" }, errors.map((each) =>
    h("li", {}, h("time", {}, `${each.ago_s} ago`), ` ${each.model}, ${each.replica}: ${each.sentence}`)))
    : h("p", { class: "none" }, "None since the start of the gateway."));
}

place("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = place("key").value.trim();
  if (!/^[!-~]+$/.test(key)) return login("This is not a key: it has characters that no key has.");
  sessionStorage.setItem(KEY, key);
  return ask();
});
place("leave").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  ask();
});
document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : ask());
ask();
