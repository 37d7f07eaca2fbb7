// Decides which address means which view, so that a view can be linked. It is pure.

/** `#/run/r-1/samples?cycle=3` → its view, what it is of, and its settings. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [place, id = "", sub = ""] = path.split("/").map(decoded);
  const settings = Object.fromEntries(new URLSearchParams(query));
  if (place === "run" && id) return { view: sub === "samples" ? "samples" : "run", id, settings };
  if (place === "compare" && id) return { view: "compare", id, settings };
  if (place === "box" && id) return { view: "box", id, settings };
  return { view: "fleet", id: "", settings };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const settled = (settings) => {
  const query = new URLSearchParams(Object.entries(settings).filter(([, value]) => value)).toString();
  return query && `?${query}`;
};

export const toRun = (run) => `#/run/${encodeURIComponent(run)}`;
export const toBox = (agent) => `#/box/${encodeURIComponent(agent)}`;
export const toSamples = (run, settings = {}) => `${toRun(run)}/samples${settled(settings)}`;
export const toCompare = (runs) => `#/compare/${runs.map(encodeURIComponent).join(",")}`;
