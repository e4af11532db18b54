// The state of the page is its address: #/view?rule=oracle&paper=1. A link opens what the sender saw.

const SHARED = ["rule", "paper", "ci"]; // kept from view to view
let view = "overview";
let params = new URLSearchParams();

function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  view = Object.hasOwn(VIEWS, path) ? path : "overview";
  params = new URLSearchParams(query || "");
}

const param = (name, fallback = "") => params.get(name) ?? fallback;

// A parameter that has to be one of `values`; otherwise, the first of them.
function choice(name, values) {
  const found = param(name);
  return values.includes(found) ? found : values[0];
}

// The address of a view, with the shared parameters.
function address(target, changes = {}) {
  const next = new URLSearchParams();
  for (const name of SHARED) if (params.has(name)) next.set(name, params.get(name));
  for (const [name, value] of Object.entries(changes)) next.set(name, value);
  const query = next.toString();
  return `#/${target}${query ? `?${query}` : ""}`;
}

// Change parameters of this view, without an entry in the history and without drawing.
function remember(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") params.delete(name);
    else params.set(name, value);
  }
  const query = params.toString();
  history.replaceState(null, "", `#/${view}${query ? `?${query}` : ""}`);
}

const rule = () => choice("rule", Object.keys(data.rules));
const withPaper = () => param("paper", data.againstPaper ? "1" : "0") === "1";
const withIntervals = () => param("ci", "0") === "1";

// Theme: the system's, until the reader chooses.
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try {
    return localStorage.getItem("sandmask-theme");
  } catch {
    return null; // files opened from a disk may have no storage
  }
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("sandmask-theme", name);
  } catch {
    // without storage, the theme lasts until the page is closed
  }
}

const theme = () => document.documentElement.dataset.theme || (systemDark.matches ? "dark" : "light");
