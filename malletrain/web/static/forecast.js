// Past numbers of nodes, and a forecast that assumes days like those of the last week.

import { get } from "./daemon.js";
import { chart } from "./charts.js";
import { h, replace } from "./dom.js";
import { duration, number } from "./words.js";

const EVERY_MS = 60000;
const THIN = 3; // a point for each quarter of an hour

const thinned = (points) => points.filter((_, k) => k % THIN === 0);

function picture(each) {
  const ahead = thinned(each.ahead);
  const last = each.past.at(-1);
  return h("section", {}, h("h2", {}, `Class ${each.node_class}`),
    h("p", {}, each.hours < 24
      ? `${number(each.now)} nodes now. The forecast is of ${duration(3600 * each.hours)} only; after a week it is as good as it gets.`
      : `${number(each.now)} nodes now. In eight of ten cases it will be within the band.`),
    chart(`Nodes that jobs can have, class ${each.node_class}`, {
      whole: true,
      lines: [
        { name: "there were", points: thinned(each.past), style: "seen" },
        { name: "forecast", points: ahead.map(([time, , median]) => [time, median]), style: "expected",
          band: ahead.map(([time, low, , high]) => [time, low, high]) },
      ],
      marks: last ? [{ x: last[0] + each.span_s, text: "now", style: "cause-start" }] : [],
    }));
}

export function forecast(main) {
  const place = h("div", { id: "forecast" }, h("p", {}, "Asking the daemon …"));
  replace(main, h("h1", {}, "Forecast"),
    h("p", {}, "Nodes that jobs can have: those that are held, and idle ones that may be leased."), place);

  async function load() {
    try {
      const classes = await get("forecast");
      replace(place, classes.length ? classes.map(picture) : h("p", { class: "none" }, "No node was seen yet."));
    } catch (error) {
      replace(place, h("p", { class: "none", role: "alert" }, error.message));
    }
  }

  load();
  const timer = setInterval(() => document.hidden || load(), EVERY_MS);
  return { leave: () => clearInterval(timer) };
}
