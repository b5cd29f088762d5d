// Numbers and times as text, as the command line writes them.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function count(value) {
  if (value === null || value === undefined) return "";
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return Number.isInteger(value) ? String(value) : value.toPrecision(3);
}

export const rate = (value) => (value > 0 ? `${count(value)}/s` : "");

export function number(value) {
  if (value === null || value === undefined) return "";
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Formats the label of a tick of an axis: 200 k, not 2.00e+5. */
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e4) {
    const [unit, name] = UNITS.find(([each]) => size >= each);
    return `${Number((value / unit).toPrecision(4))} ${name}`;
  }
  return size && size < 1e-3 ? value.toExponential() : String(Number(value.toPrecision(4)));
}

// A metric of a script. JSON has no number for NaN and infinity, which come as null.
export const measured = (value) => (value === null ? "not a number" : number(value));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

/** Formats a number: two decimals for small numbers, none for large ones. */
// What a job wants, as its owner said it: 1:16, or 1:16 GPUs.
export const sizes = (job) => `${job.min_nodes}:${job.max_nodes}${{ slots: " slots", gpus: " GPUs" }[job.counts] || ""}`;

export const amount = (value) => value.toFixed(value < 10 ? 2 : value < 1000 ? 1 : 0);

/** Formats node-hours for users: 5 min, not 0.08 h. */
export function nodeTime(hours) {
  if (!hours) return "0";
  return hours < 1 ? duration(hours * 3600) : `${hours.toFixed(hours < 1000 ? 1 : 0)} h`;
}

/** Abbreviates names of nodes, n[1-3,07], as scavenger/hostlist.py writes them. */
export function hosts(names) {
  const groups = new Map();
  for (const name of [...new Set(names)].sort(natural)) {
    const [, prefix, digits] = name.match(/^(.*?)(\d*)$/);
    const width = digits.length > 1 && digits.startsWith("0") ? digits.length : 0;
    const key = `${prefix}/${digits ? width : ""}`;
    if (!groups.has(key)) groups.set(key, { prefix, width, runs: [] });
    if (!digits) continue;
    const { runs } = groups.get(key);
    const next = runs.length && runs.at(-1)[1] + 1 === Number(digits);
    if (next && (width || String(runs.at(-1)[0]).length === digits.length)) runs.at(-1)[1] += 1;
    else runs.push([Number(digits), Number(digits)]);
  }
  return [...groups.values()].map(({ prefix, width, runs }) => {
    const texts = runs.map((ends) => [...new Set(ends)].map((end) => String(end).padStart(width, "0")).join("-"));
    const single = texts.length === 1 && !texts[0].includes("-");
    return runs.length ? `${prefix}${single ? texts[0] : `[${texts.join(",")}]`}` : prefix;
  }).join(",");
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export function moment(time) {
  if (!time) return "";
  const date = new Date(time * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(time) : `${date.toLocaleDateString()} ${clock(time).slice(0, 5)}`;
}

/** Compares n2 before n10. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

/** What is wrong at the site, or held back by operators, as sentences of the daemon. */
export const problems = (status) => [status.restraint, ...status.users_problems, ...status.failed_starts,
  status.handler_failures, ...Object.values(status.late)].filter(Boolean);

export const ENDED = new Set(["completed", "failed", "cancelled"]);

/** Returns the reason of a change of scale. */
export const CAUSES = {
  start: "start",
  up: "more nodes",
  down: "fewer nodes",
  same: "other nodes",
  loss: "a node or a worker was lost",
};

/** Returns the state of a profile, in the words of `malletrain show` (malletrain/render/job_detail.py). */
export const STANDS = {
  off: "not measured",
  waiting: "not measured yet",
  profiling: "being measured now",
  measured: "measured",
  partial: "measured in part",
  unknown: "not known",
  gone: "measured in part",
  known: "known without a measurement of its own",
};

/** Returns the part of a step, in the words of `malletrain show` (malletrain/render/job_detail.py). */
export const PARTS = {
  data: "waiting for data",
  computing: "computing",
  others: "waiting for other ranks",
  transfer: "exchanging gradients",
  snapshot: "in snapshots",
};

export const STATES = {
  idle: "idle",
  leasing: "being leased",
  free: "leased, no job",
  job: "training",
  leaving: "leaving",
  sick: "sick",
  slow: "slow",
};
