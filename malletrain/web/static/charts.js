// Charts as SVG: lines over time or number of nodes, and stacked bars. They are drawn as wide as their place, so that
// their words have the size of other text at every width.

import { h, replace, s } from "./dom.js";
import { clock, number, tick } from "./words.js";

const FIRST_WIDTH = 720; // until the place is known
const FONT_PX = 12;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 26;
const BETWEEN_LABELS = 24;
const ROW = 20;

let canvas = null;

/** Returns the width of a text in a chart, pixels. */
export function textWidth(text) {
  canvas ??= document.createElement("canvas").getContext?.("2d") ?? {};
  if (!canvas.measureText) return 7 * text.length;
  canvas.font = `${FONT_PX}px system-ui, sans-serif`;
  return canvas.measureText(text).width;
}

/** Returns the width of the widest of these texts, pixels. */
export const widest = (texts) => Math.max(0, ...texts.map(textWidth));

/**
 * A picture with its description. `draw(width)` returns {height, parts}: it is called again when the width changes.
 * `legend`: [element, name] pairs.
 */
export function picture(label, draw, legend = []) {
  const svg = s("svg", { role: "img", "aria-label": label });
  let drawn = 0;
  const fit = (width) => {
    if (width <= 0 || width === drawn) return;
    drawn = width;
    const { height, parts } = draw(width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    replace(svg, parts);
  };
  fit(FIRST_WIDTH);
  const made = h("figure", {}, svg, h("figcaption", {}, label, legend.length > 0 && h("span", { class: "legend" },
    legend.map(([key, name]) => h("span", {}, key, name)))));
  if (globalThis.ResizeObserver) {
    new ResizeObserver((entries) => fit(Math.floor(entries.at(-1).contentRect.width))).observe(made);
  }
  return made;
}

const key = (style) => h("i", { class: `key ${style}` });

/** Returns about `most` round numbers from `low` to `high` or the next one below and above, for ticks. */
export function ticks(low, high, most = 5) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= raw * (1 - 1e-9));
  const made = [];
  const last = Math.ceil(high / step - 1e-9);
  for (let k = Math.floor(low / step + 1e-9); k <= last; k += 1) made.push(Number((k * step).toPrecision(12)));
  return made;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const MINUTE = 60;
const DAY = 86400;

/** Returns the label of a tick: no seconds where all are whole minutes, the day at midnight. */
function timeLabel(time, step) {
  if (step < MINUTE) return clock(time);
  const text = clock(time).slice(0, 5);
  const long = step >= DAY || (step >= 3600 && text === "00:00");
  return long ? new Date(time * 1000).toLocaleDateString([], { day: "numeric", month: "short" }) : text;
}

/** Returns the labels of a time axis from `left` to `right`, as many as there is room for. */
export function timeAxis(low, high, left, right, y) {
  const most = Math.max(1, Math.floor((right - left) / (textWidth("00:00:00") + BETWEEN_LABELS)));
  const step = TIME_STEPS.find((each) => (high - low) / each <= most) ?? DAY * Math.ceil((high - low) / most / DAY);
  const zone = -60 * new Date(low * 1000).getTimezoneOffset(); // ticks are round in local time
  const made = [];
  for (let at = Math.ceil((low + zone) / step) * step - zone; at <= high; at += step) {
    made.push(below(left + ((at - low) / (high - low)) * (right - left), y, timeLabel(at, step), right));
  }
  return made;
}

/** Returns a label centred at `x`, or as near to it as it is whole. */
function below(x, y, text, right) {
  const half = textWidth(text) / 2;
  return s("text", { x: Math.max(half, Math.min(x, right + RIGHT - half)).toFixed(1), y, "text-anchor": "middle" }, text);
}

const grid = (left, right, y, text) => [
  s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
  s("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text)];

const stepped = (points) => points.flatMap(([x, y], k) => (k ? [[x, points[k - 1][1]], [x, y]] : [[x, y]]));

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/**
 * A line chart. `lines`: {name, points: [[x, y]], style: class, stepped, dots, band: [[x, low, high]]};
 * `marks`: {x, text, style}. `time`: whether x are times. `whole`: whether y are whole numbers. `label`: description in a
 * sentence. `legend`: [style, name] pairs besides the lines.
 */
export function chart(label, { lines, marks = [], time = true, height = 180, whole = false, legend = [] }) {
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
  const yTicks = ticks(yMin, yMax, 4).filter((y) => !whole || Number.isInteger(y));
  [yMin, yMax] = [Math.min(yMin, yTicks[0]), Math.max(yMax, yTicks.at(-1))];
  const left = Math.ceil(widest(yTicks.map(tick))) + 12;

  function draw(width) {
    const right = width - RIGHT;
    const px = (x) => left + ((x - xMin) / (xMax - xMin)) * (right - left);
    const py = (y) => height - BOTTOM - ((y - yMin) / (yMax - yMin)) * (height - TOP - BOTTOM);
    const at = (points) => points.map(([x, y]) => [px(x), py(y)]);
    const parts = yTicks.flatMap((y) => grid(left, right, py(y), tick(y)));
    if (time) {
      parts.push(...timeAxis(xMin, xMax, left, right, height - 8));
    } else {
      const most = Math.max(1, Math.floor((right - left) / (textWidth(String(xMax)) + BETWEEN_LABELS)));
      const inside = ticks(xMin, xMax, Math.min(8, most)).filter((x) => Number.isInteger(x) && x >= xMin && x <= xMax);
      parts.push(...inside.map((x) => below(px(x), height - 8, String(x), right)));
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
    return { height, parts };
  }
  const names = lines.filter((line) => line.name).map((line) => [line.style, line.name]);
  return picture(label, draw, [...(names.length > 1 ? names : []), ...legend].map(([style, name]) => [key(style), name]));
}

/**
 * Stacked areas of shares over time. `points`: [[time, share of each part]]; `names`: the parts, from the bottom;
 * `label`: description in a sentence.
 */
export function shares(label, points, names, height = 180) {
  const [xMin, xMax] = [points[0][0], Math.max(points.at(-1)[0], points[0][0] + 1)];
  const left = Math.ceil(textWidth("100 %")) + 12;
  const tops = [points.map(() => 0)];
  names.forEach((_, k) => tops.push(points.map((point, at) => tops[k][at] + point[k + 1])));

  function draw(width) {
    const right = width - RIGHT;
    const px = (x) => left + ((x - xMin) / (xMax - xMin)) * (right - left);
    const py = (y) => height - BOTTOM - Math.min(1, Math.max(0, y)) * (height - TOP - BOTTOM);
    const edge = (sums) => points.map(([x], at) => [px(x), py(sums[at])]);
    const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((y) => grid(left, right, py(y), `${100 * y} %`));
    parts.push(...timeAxis(xMin, xMax, left, right, height - 8));
    names.forEach((name, k) => {
      const outline = [...edge(tops[k + 1]), ...edge(tops[k]).reverse()];
      parts.push(s("path", { class: `area part${k % 8}`, d: `${path(outline)}Z` },
        s("title", {}, `${name}: ${number(Math.round(1000 * points.at(-1)[k + 1]) / 10)} % at last`)));
    });
    return { height, parts };
  }
  return picture(label, draw, names.map((name, k) => [key(`part${k % 8}`), name]));
}

/** A chart of stacked bars. `rows`: {name, parts: [[part, seconds]]}; `order`: all parts, for their colours. */
export function bars(label, rows, order) {
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, [, size]) => sum + size, 0)), 1e-9);
  const height = rows.length * ROW + BOTTOM;
  const left = Math.ceil(widest(rows.map((row) => row.name))) + 12;

  function draw(width) {
    const right = width - RIGHT;
    const scale = (right - left) / most;
    const room = Math.max(1, Math.floor((right - left) / (textWidth("0000 s") + BETWEEN_LABELS)));
    const parts = ticks(0, most, Math.min(5, room)).filter((x) => x <= most)
      .map((x) => below(left + x * scale, height - 8, `${number(x)} s`, right));
    rows.forEach((row, k) => {
      parts.push(s("text", { x: left - 8, y: k * ROW + 14, "text-anchor": "end" }, row.name));
      let x = left;
      for (const [part, size] of row.parts) {
        parts.push(s("rect", { class: `part part${order.indexOf(part) % 8}`, x, y: k * ROW + 3,
          width: Math.max(0, size * scale), height: 14 }, s("title", {}, `${part}: ${number(size)} s`)));
        x += size * scale;
      }
    });
    return { height, parts };
  }
  return picture(label, draw, order.map((part, k) => [key(`part${k % 8}`), part]));
}
