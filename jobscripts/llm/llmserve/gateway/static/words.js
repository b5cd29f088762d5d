// Numbers and times as text.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
const SIZES = { T: 1e12, G: 1e9, M: 1e6, k: 1e3 };

export function count(value) {
  for (const [from, unit] of UNITS) {
    if (value >= from) return `${Number((value / SIZES[unit]).toPrecision(3))} ${unit}`;
  }
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

/** Formats a time as people measure latencies; empty if there is none. */
export function latency(seconds) {
  if (seconds === null) return "";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  return seconds < 100 ? `${Number(seconds.toPrecision(2))} s` : duration(seconds);
}

export function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export function moment(time) {
  const date = new Date(time * 1000);
  const clock = date.toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit" });
  return new Date().toDateString() === date.toDateString() ? clock : `${date.toLocaleDateString()} ${clock}`;
}

/** Formats an amount with its noun: 1 node, 2 nodes. */
export const amount = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
