// Creates elements. All text from a job (its name, its log, its metrics) becomes a text node or
// the value of an attribute, never markup. The page creates content in no other way.

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

/** Creates an HTML element with attributes, listeners (`onclick`) and children. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Creates an SVG element in the same way. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces the content of `element` by `children`. */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Creates a link to a part of this page. */
export function link(path, ...children) {
  return h("a", { href: `#/${path}` }, ...children);
}

/** Returns a name in pieces between which a line may break, so that its words stay whole. */
export const breakable = (name) => name.split(/(?<=[^\p{L}\p{N}])/u).flatMap((piece, k) => (k ? [h("wbr", {}), piece] : [piece]));

/** Returns for each column whether any row has a value in it. */
export const filled = (columns, rows) => columns.map((_, k) => k)
  .filter((k) => rows.some((cells) => cells[k] !== "" && cells[k] !== null && cells[k] !== undefined));

/** Creates a table with a caption for screen readers. `columns`: [title, "number" or ""]; `rows`: cells. Empty columns
 * are left out. */
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

/** Creates a section with a heading. */
export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}
