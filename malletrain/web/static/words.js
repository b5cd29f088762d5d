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

export const hours = (value) => value.toFixed(value < 10 ? 2 : value < 1000 ? 1 : 0);

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

export function moment(time) {
  if (!time) return "";
  const date = new Date(time * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(time) : `${date.toLocaleDateString()} ${clock(time).slice(0, 5)}`;
}

/** Compares n2 before n10. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

export const ENDED = new Set(["completed", "failed", "cancelled"]);

/** What a change of scale was for. */
export const CAUSES = {
  start: "start",
  up: "more nodes",
  down: "fewer nodes",
  same: "other nodes",
  loss: "a node was lost",
};

/** How a profile stands, in the words of `malletrain show` (malletrain/render/scaling.py). */
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

export const STATES = {
  idle: "idle",
  leasing: "being leased",
  free: "leased, no job",
  job: "training",
  leaving: "leaving",
  sick: "sick",
  slow: "slow",
};
