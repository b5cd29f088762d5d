// Client of the API: the stream of changes that keeps `seen` up to date, and single requests.

/** The newest state, updated by the stream. */
export const seen = { machine: null, jobs: new Map(), nodes: new Map(), events: [], problem: "" };

const MOST_EVENTS = 300;
const listeners = new Set();
let source = null;

/** Calls `listener(change)` after each change. Returns a function that ends this. */
export function onchange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function take(change) {
  seen.machine = change.machine;
  seen.problem = "";
  if (change.full) {
    seen.jobs = new Map();
    seen.nodes = new Map();
    seen.events = [];
  }
  for (const job of change.jobs) seen.jobs.set(job.id, job);
  for (const id of change.gone) seen.jobs.delete(id);
  for (const node of change.nodes) seen.nodes.set(node.node, node);
  for (const name of change.nodes_gone) seen.nodes.delete(name);
  seen.events = [...seen.events, ...change.events].slice(-MOST_EVENTS);
  tell(change);
}

function tell(change) {
  for (const listener of [...listeners]) listener(change);
}

function connect() {
  source?.close();
  source = new EventSource("api/v1/stream");
  source.addEventListener("change", (message) => take(JSON.parse(message.data)));
  source.addEventListener("error", async () => {
    seen.problem = "No answer from 'malletrain web'; trying again …";
    if (source.readyState === EventSource.CLOSED) {
      // The browser has given up. A refusal has a reason; other errors may be temporary.
      try {
        await get("machine");
      } catch (error) {
        seen.problem = error.message;
      }
      setTimeout(() => document.hidden || connect(), 2000);
    }
    tell(null);
  });
}

/** Follows the daemon while the page is visible, so that a hidden page causes no load. */
export function follow() {
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (source === null) {
      connect();
    }
  });
  connect();
}

/** Sends a request. An error is `refused` if the same request would be refused again. */
async function request(path, options) {
  const answer = await fetch(`api/v1/${path}`, { cache: "no-store", ...options });
  const text = await answer.text();
  let data = null;
  try {
    data = JSON.parse(text);
  } catch {
    data = { error: text || `The server answered ${answer.status}.` };
  }
  if (!answer.ok) throw Object.assign(new Error(data.error), { refused: answer.status < 500 });
  return data;
}

export const get = (path) => request(path, {});

/** Sends a request that changes something. */
export function send(method, path, body) {
  return request(path, {
    method,
    headers: { "Content-Type": "application/json", "X-MalleTrain": "page" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
}

/** Returns the API path of a job. Its name is escaped. */
export const jobPath = (job, rest = "") => `jobs/${encodeURIComponent(job)}${rest}`;
