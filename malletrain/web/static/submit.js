// Submits a job, with the options of `malletrain submit`.

import { send } from "./daemon.js";
import { h, replace } from "./dom.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function field(name, label, help, attributes = {}, tag = "input") {
  return h("p", { class: "field" }, h("label", { for: name }, label),
    h(tag, { id: name, name, "aria-describedby": `${name}-help`, ...attributes }),
    h("small", { id: `${name}-help` }, help));
}

export function submit(main) {
  const problem = h("p", { role: "alert", id: "problem", class: "problem", hidden: true });
  const button = h("button", { type: "submit", class: "primary" }, "Submit");
  const form = h("form", { id: "submit-form", onsubmit: go },
    field("script", "Script", "Its path on the host where 'malletrain web' runs; the nodes must see it too.", { required: true, autocomplete: "off" }),
    field("args", "Arguments", "One a line, as the script gets them.", { rows: 3 }, "textarea"),
    field("nodes", "Nodes", "N or MIN:MAX, such as 1:16.", { value: "1", pattern: "[0-9]+(:[0-9]+)?" }),
    field("name", "Name", "Default: that of the script.", { autocomplete: "off" }),
    field("workdir", "Working directory", "Default: where 'malletrain web' was started.", { autocomplete: "off" }),
    field("env", "Environment", "NAME=VALUE, one a line.", { rows: 2 }, "textarea"),
    field("venv", "Virtual environment", "Its directory. Default: the Python of 'malletrain web'.", { autocomplete: "off" }),
    field("container", "Container image", "A path or an address, where the site has a runtime.", { autocomplete: "off" }),
    h("p", {}, h("label", {}, h("input", { type: "checkbox", name: "live" }), " live mode: the script uses malletrain.elastic")),
    h("p", {}, h("label", {}, h("input", { type: "checkbox", name: "profile", checked: true }), " measure how it scales")),
    problem, h("p", {}, button));
  replace(main, h("h1", {}, "Submit a job"), form);

  async function go(event) {
    event.preventDefault();
    const fields = new FormData(form);
    const text = (name) => fields.get(name).trim();
    const body = { script: text("script"), args: lines(fields.get("args")), env: lines(fields.get("env")),
      live: fields.has("live"), profile: fields.has("profile") };
    for (const name of ["nodes", "name", "workdir", "venv", "container"]) if (text(name)) body[name] = text(name);
    button.disabled = true;
    problem.hidden = true;
    try {
      const job = await send("POST", "jobs", body);
      location.hash = `#/job/${job.id}`;
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      button.disabled = false;
    }
  }
  return {};
}
