// Making elements. Whatever comes from a job (its name, its log, its metrics) becomes a text node or
// the value of an attribute, never markup: there is no other way to make content on this page.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An HTML element with attributes, listeners (`onclick`) and children. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, in the same way. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Put `children` in the place of all that `element` holds. */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** A link to a part of this page. */
export function link(path, ...children) {
  return h("a", { href: `#/${path}` }, ...children);
}

/** Which columns have something in a row. */
export const filled = (columns, rows) => columns.map((_, k) => k)
  .filter((k) => rows.some((cells) => cells[k] !== "" && cells[k] !== null && cells[k] !== undefined));

/** A table with a caption for screen readers. `columns`: [title, "number" or ""]; `rows`: cells. A column without
 * anything in it is left out. */
export function table(caption, allColumns, allRows) {
  const indices = filled(allColumns, allRows);
  const columns = indices.map((k) => allColumns[k]);
  const rows = allRows.map((cells) => indices.map((k) => cells[k]));
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((cells) =>
    h("tr", {}, cells.map((cell, k) => h("td", { class: columns[k][1] }, cell))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** A section with a heading. */
export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}
