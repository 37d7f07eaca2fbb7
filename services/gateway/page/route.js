// Converts between addresses and views, so that views can be linked. Pure functions.

/** Splits an address such as `#/run/r-1/samples?cycle=3` into view, id and settings. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [place, id = "", sub = ""] = path.split("/").map(decode);
  const settings = Object.fromEntries(new URLSearchParams(query));
  if (place === "run" && id) return { view: sub === "samples" ? "samples" : "run", id, settings };
  if (place === "compare" && id) return { view: "compare", id, settings };
  if (place === "channel" && id) return { view: "channel", id, settings };
  if (place === "box" && id) return { view: "box", id, settings };
  return { view: "fleet", id: "", settings };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const toQuery = (settings) => {
  const query = new URLSearchParams(Object.entries(settings).filter(([, value]) => value)).toString();
  return query && `?${query}`;
};

export const toRun = (run) => `#/run/${encodeURIComponent(run)}`;
export const toBox = (agent) => `#/box/${encodeURIComponent(agent)}`;
export const toChannel = (name) => `#/channel/${encodeURIComponent(name)}`;
export const toSamples = (run, settings = {}) => `${toRun(run)}/samples${toQuery(settings)}`;
export const toCompare = (runs) => `#/compare/${runs.map(encodeURIComponent).join(",")}`;
