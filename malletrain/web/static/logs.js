// A log that is followed.

import { get, jobPath } from "./daemon.js";
import { h } from "./dom.js";

const MOST = 400_000;
const EVERY_MS = 1500;

export function logs(id) {
  const text = h("pre", { id: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log" });
  const stream = h("select", { id: "stream", onchange: again }, h("option", { value: "rank0" }, "rank0"));
  const follow = h("input", { type: "checkbox", id: "follow", checked: true });
  const state = h("span", { class: "none" });
  let cursor = "";
  let asking = false;
  let requestTime = 0;
  let over = false;
  let complete = false;
  let turn = 0;

  function again() {
    cursor = "";
    complete = false;
    requestTime = 0;
    turn += 1;
    text.textContent = "";
    look();
  }

  async function look() {
    if (asking || over || complete || Date.now() - requestTime < EVERY_MS) return;
    asking = true;
    requestTime = Date.now();
    const mine = turn;
    try {
      let more = true;
      while (more && !over && mine === turn) {
        const place = new URLSearchParams({ stream: stream.value, cursor });
        const piece = await get(jobPath(id, `/logs?${place}`));
        if (mine !== turn) break;
        more = piece.more && piece.text !== "";
        cursor = piece.cursor;
        complete = piece.ended && !piece.more;
        add(piece.text);
        offer(piece.streams);
        state.textContent = complete ? "This is all of it." : piece.arriving ? "The end is still arriving." : "";
      }
    } catch (error) {
      state.textContent = error.message;
    }
    asking = false;
    if (mine !== turn) look();
  }

  function add(piece) {
    if (!piece) return;
    text.append(document.createTextNode(piece));
    while (text.childNodes.length > 1 && text.textContent.length > MOST) text.firstChild.remove();
    if (follow.checked) text.scrollTop = text.scrollHeight;
  }

  function offer(streams) {
    const there = new Set([...stream.options].map((option) => option.value));
    for (const name of streams) if (!there.has(name)) stream.append(h("option", { value: name }, name));
  }

  look();
  return {
    element: h("div", {}, h("p", {}, h("label", { for: "stream" }, "Of "), stream, " ",
      h("label", {}, follow, " follow"), " ", state), text),
    look: () => { look(); },
    leave: () => { over = true; },
  };
}
