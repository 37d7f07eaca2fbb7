// A small virtual DOM: `h` describes elements, `patch` changes only the nodes that differ.

const SVG = "http://www.w3.org/2000/svg";
/** The property of a node with the description it was drawn from. */
const DRAWN = Symbol("drawn");
/** State that users change and that attributes do not reflect. */
const PROPERTIES = new Set(["value", "checked", "disabled", "open", "selected"]);

const isText = (child) => child === null || typeof child !== "object";
const textOf = (child) => (child === null || child === false ? "" : String(child));
const isProps = (it) => !isText(it) && !Array.isArray(it) && !it.tag && !it.make;

/**
 * Describes an element: `h("p.note.warn", { title }, …)`. Props are optional. A child that is false,
 * null or undefined becomes an empty text node, so that its siblings keep their nodes.
 */
export function h(selector, ...children) {
  const props = isProps(children[0] ?? null) ? { ...children.shift() } : {};
  const [tag, ...classes] = selector.split(".");
  if (props.class) classes.push(props.class);
  if (classes.length) props.class = classes.join(" ");
  return { tag, props, key: props.key, children };
}

/** Describes a node only if one of `deps` changed, and never while `isOffscreen(node)`. */
export const lazy = (key, deps, make, isOffscreen) => ({ key, deps, make, isOffscreen });

/** Makes the children of `parent` match the descriptions; matching nodes are kept. */
export function patch(parent, children) {
  children = children.flat(Infinity).map((child) => child ?? null);
  const keyed = dropUnwanted(parent, children);
  let at = parent.firstChild;
  for (const child of children) {
    const old = child?.key === undefined ? at : keyed.get(child.key);
    const node = matches(old, child) ? refresh(old, child) : create(child, parent);
    // A second child with the same key gets a new node.
    if (child?.key !== undefined) keyed.delete(child.key);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** Runs first: otherwise later nodes would move and lose the focus. */
function dropUnwanted(parent, children) {
  const wanted = new Set(children.map((child) => child?.key));
  const keyed = new Map();
  for (const node of [...parent.childNodes]) {
    const key = node[DRAWN]?.key;
    if (key === undefined) continue;
    if (wanted.has(key)) keyed.set(key, node);
    else node.remove();
  }
  return keyed;
}

function matches(node, child) {
  if (!node || isText(child)) return node?.nodeType === Node.TEXT_NODE;
  const drawn = node[DRAWN];
  return drawn !== undefined && drawn.key === child.key && (child.make || drawn.tag === child.tag);
}

function create(child, parent) {
  if (isText(child)) return document.createTextNode(textOf(child));
  const tree = child.make?.() ?? child;
  const node = document.createElementNS(tree.tag === "svg" ? SVG : parent.namespaceURI, tree.tag);
  draw(node, {}, tree, child);
  tree.props.ref?.(node);
  return node;
}

function refresh(node, child) {
  if (isText(child)) {
    if (node.data !== textOf(child)) node.data = textOf(child);
    return node;
  }
  const drawn = node[DRAWN];
  const same = child.deps?.every((dep, at) => dep === drawn.deps?.[at]);
  if (!same && !child.isOffscreen?.(node)) draw(node, drawn.props, child.make?.() ?? child, child);
  return node;
}

function draw(node, before, { tag, props, children }, { key, deps }) {
  node[DRAWN] = { tag, props, key, deps };
  for (const name in before) if (!(name in props)) set(node, name, null);
  for (const name in props) if (before[name] !== props[name]) set(node, name, props[name]);
  patch(node, children);
}

function set(node, name, value) {
  if (name === "key" || name === "ref") return;
  if (name.startsWith("on")) node[name] = value;
  else if (name === "width%") node.style.width = `${value}%`;
  else if (PROPERTIES.has(name)) node[name] = value ?? "";
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

/** Combines all requests within a frame into one call of `draw`. */
export function perFrame(draw) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      draw();
    });
  };
}
