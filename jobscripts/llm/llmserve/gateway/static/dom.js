// Creates elements. All text from users and engines becomes a text node or the value of an
// attribute, never markup. The page creates content in no other way.

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Creates an HTML element with attributes and children. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  append(element, children);
  return element;
}

const contents = new WeakMap();

/** Replaces the content of `element`, unless it shows `data` already. Tables stay scrolled, and keep the focus. */
export function show(element, data, draw) {
  const text = JSON.stringify(data);
  if (contents.get(element) === text) return;
  contents.set(element, text);
  const regions = () => [...element.querySelectorAll(".scroll")];
  const places = new Map(regions().map((each) => [each.getAttribute("aria-label"), [each.scrollLeft, each === document.activeElement]]));
  element.replaceChildren();
  append(element, [draw(data)]);
  for (const each of regions()) {
    const [left, focused] = places.get(each.getAttribute("aria-label")) ?? [0, false];
    each.scrollLeft = left;
    if (focused) each.focus({ preventScroll: true });
  }
}

/** Creates a table with a caption for screen readers. `columns`: [title, class]; `rows`: cells. Columns without any
 * value are left out. */
export function table(caption, allColumns, allRows) {
  const shown = allColumns.map((_, k) => k).filter((k) => allRows.some((cells) => cells[k] !== "" && cells[k] !== null));
  const head = shown.map((k) => h("th", { scope: "col", class: allColumns[k][1] }, allColumns[k][0]));
  const body = allRows.map((cells) => h("tr", {}, shown.map((k) => h("td", { class: allColumns[k][1] }, cells[k]))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** Creates a section with a heading. */
export const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);
