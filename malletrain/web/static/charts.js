// Charts as SVG: lines over time or number of nodes, and stacked bars.

import { h, s } from "./dom.js";
import { clock, number } from "./words.js";

const WIDTH = 720;
const LEFT = 58;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 26;

/** Returns about `most` round numbers between `low` and `high`, for ticks. */
export function ticks(low, high, most = 5) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= raw);
  const made = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k += 1) made.push(k * step);
  return made;
}

/** Returns whole seconds, minutes or hours between two times, for ticks. */
function timeTicks(low, high) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((each) => (high - low) / each <= 6) ?? 604800;
  const made = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) made.push(at);
  return made;
}

const stepped = (points) => points.flatMap(([x, y], k) => (k ? [[x, points[k - 1][1]], [x, y]] : [[x, y]]));

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/**
 * A line chart. `lines`: {name, points: [[x, y]], style: class, stepped, dots, band: [[x, low, high]]};
 * `marks`: {x, text, style}. `time`: whether x are times. `whole`: whether y are whole numbers. `label`: description in a sentence.
 */
export function chart(label, { lines, marks = [], time = true, height = 180, whole = false }) {
  const all = lines.flatMap((line) => [
    ...line.points, ...(line.band ?? []).flatMap(([x, low, high]) => [[x, low], [x, high]])]);
  if (!all.length) return h("p", { class: "none" }, `${label}: nothing seen yet.`);
  const xs = [...all.map(([x]) => x), ...marks.map((mark) => mark.x)];
  const ys = all.map(([, y]) => y).filter(Number.isFinite);
  let [xMin, xMax] = [Math.min(...xs), Math.max(...xs)];
  let [yMin, yMax] = [Math.min(...ys), Math.max(...ys)];
  if (whole || (yMin > 0 && yMin < 0.6 * yMax)) yMin = 0;
  if (yMax === yMin) [yMin, yMax] = [yMin - Math.abs(yMin) * 0.1 - 0.5, yMax + Math.abs(yMax) * 0.1 + 0.5];
  if (xMax === xMin) [xMin, xMax] = [xMin - 1, xMax + 1];
  const px = (x) => LEFT + ((x - xMin) / (xMax - xMin)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => height - BOTTOM - ((y - yMin) / (yMax - yMin)) * (height - TOP - BOTTOM);
  const at = (points) => points.map(([x, y]) => [px(x), py(y)]);
  const parts = [];
  for (const y of ticks(yMin, yMax, 4)) {
    if (whole && !Number.isInteger(y)) continue;
    parts.push(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }),
      s("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of time ? timeTicks(xMin, xMax) : ticks(xMin, xMax, 8)) {
    if (!time && !Number.isInteger(x)) continue;
    parts.push(s("text", { x: px(x), y: height - 8, "text-anchor": "middle" },
      time ? clock(x) : String(x)));
  }
  for (const mark of marks) {
    parts.push(s("line", { class: `mark ${mark.style}`, x1: px(mark.x), x2: px(mark.x), y1: TOP,
      y2: height - BOTTOM }, s("title", {}, mark.text)));
  }
  for (const line of lines) {
    if (line.band?.length) {
      const edge = [...line.band.map(([x, , top]) => [x, top]),
        ...[...line.band].reverse().map(([x, bottom]) => [x, bottom])];
      parts.push(s("path", { class: `band ${line.style}`, d: `${path(at(edge))}Z` }));
    }
    const points = line.stepped ? stepped(line.points) : line.points;
    if (!line.onlyDots) parts.push(s("path", { class: `line ${line.style}`, d: path(at(points)) }));
    if (line.dots || line.onlyDots) {
      parts.push(...line.points.map(([x, y, text]) =>
        s("circle", { class: `dot ${line.style}`, cx: px(x), cy: py(y), r: 4 }, s("title", {}, text ?? number(y)))));
    }
  }
  const names = lines.filter((line) => line.name);
  return h("figure", {},
    s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, parts),
    h("figcaption", {}, label, names.length > 1 && h("span", { class: "legend" },
      names.map((line) => h("span", {}, h("i", { class: `key ${line.style}` }), line.name)))));
}

/**
 * Stacked areas of shares over time. `points`: [[time, share of each part]]; `names`: the parts, from the bottom;
 * `label`: description in a sentence.
 */
export function shares(label, points, names, height = 180) {
  const [xMin, xMax] = [points[0][0], Math.max(points.at(-1)[0], points[0][0] + 1)];
  const px = (x) => LEFT + ((x - xMin) / (xMax - xMin)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => height - BOTTOM - Math.min(1, Math.max(0, y)) * (height - TOP - BOTTOM);
  const tops = [points.map(() => 0)];
  names.forEach((_, k) => tops.push(points.map((point, at) => tops[k][at] + point[k + 1])));
  const edge = (sums) => points.map(([x], at) => [px(x), py(sums[at])]);
  const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((y) => [
    s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }),
    s("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, `${100 * y} %`)]);
  for (const x of timeTicks(xMin, xMax)) {
    parts.push(s("text", { x: px(x), y: height - 8, "text-anchor": "middle" }, clock(x)));
  }
  names.forEach((name, k) => {
    const outline = [...edge(tops[k + 1]), ...edge(tops[k]).reverse()];
    parts.push(s("path", { class: `area part${k % 8}`, d: `${path(outline)}Z` },
      s("title", {}, `${name}: ${number(Math.round(1000 * points.at(-1)[k + 1]) / 10)} % at last`)));
  });
  return h("figure", {}, s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, parts),
    h("figcaption", {}, label, h("span", { class: "legend" },
      names.map((name, k) => h("span", {}, h("i", { class: `key part${k % 8}` }), name)))));
}

/** A chart of stacked bars. `rows`: {name, parts: [[part, seconds]]}; `order`: all parts, for their colours. */
export function bars(label, rows, order) {
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, [, size]) => sum + size, 0)), 1e-9);
  const height = rows.length * 20 + BOTTOM;
  const labelWidth = 150;
  const scale = (WIDTH - labelWidth - RIGHT) / most;
  const parts = ticks(0, most, 5).map((x) =>
    s("text", { x: labelWidth + x * scale, y: height - 8, "text-anchor": "middle" }, `${number(x)} s`));
  rows.forEach((row, k) => {
    parts.push(s("text", { x: labelWidth - 8, y: k * 20 + 14, "text-anchor": "end" }, row.name));
    let x = labelWidth;
    for (const [part, size] of row.parts) {
      parts.push(s("rect", { class: `part part${order.indexOf(part) % 8}`, x, y: k * 20 + 3,
        width: Math.max(0, size * scale), height: 14 }, s("title", {}, `${part}: ${number(size)} s`)));
      x += size * scale;
    }
  });
  return h("figure", {}, s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, parts),
    h("figcaption", {}, label, h("span", { class: "legend" },
      order.map((part, k) => h("span", {}, h("i", { class: `key part${k % 8}` }), part)))));
}
