// Selects the page to show, and updates the common parts of all pages.

import { follow, onchange, seen } from "./daemon.js";
import { replace } from "./dom.js";
import { clock } from "./words.js";
import { machine } from "./machine.js";
import { jobs } from "./jobs.js";
import { job } from "./job.js";
import { sweeps } from "./sweeps.js";
import { forecast } from "./forecast.js";
import { usage } from "./usage.js";
import { submit } from "./submit.js";

// A page is a function of the element to fill and the rest of the URL. It returns functions to call
// after each change (`update`) and when the user leaves it (`leave`).
const PAGES = { machine, jobs, job, sweeps, forecast, usage, submit };

const main = document.getElementById("main");
let page = null;

function show() {
  const [name = "machine", ...rest] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  const chosen = Object.hasOwn(PAGES, name) ? name : "machine";
  page?.leave?.();
  replace(main);
  page = PAGES[chosen](main, rest.map(decodeURIComponent));
  for (const each of document.querySelectorAll("nav a")) {
    const here = each.dataset.page === (chosen === "job" ? "jobs" : chosen);
    if (here) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  const title = main.querySelector("h1")?.textContent;
  document.title = title ? `${title} - MalleTrain` : "MalleTrain";
  if (seen.machine) page.update?.(null);
}

function frame() {
  const away = document.getElementById("away");
  const sentence = seen.problem || seen.machine?.away || "";
  const looked = seen.machine?.looked;
  const text = sentence && looked ? `${sentence} What you see is of ${clock(looked)}.` : sentence;
  if (away.textContent !== text) away.textContent = text;
  away.hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
  const status = seen.machine?.status;
  if (status) {
    document.getElementById("who").textContent =
      `${seen.machine.user} · ${status.scheduler} · daemon ${status.version}`;
  }
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  show();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});

onchange((change) => {
  frame();
  if (seen.machine) page?.update?.(change);
});
show();
follow();
