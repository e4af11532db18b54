// The page: its views, the settings that they share, and changes of the address.

const VIEWS = {
  overview: { title: "Overview", draw: drawOverview },
  tables: { title: "Tables", draw: drawTables },
  comparisons: { title: "Comparisons", draw: drawComparisons },
  hyperparameters: { title: "Hyperparameters", draw: drawHyperparameters },
  regret: { title: "Selection regret", draw: drawRegret },
  runs: { title: "Runs", draw: drawRuns },
  run: { title: "Run", draw: drawRun, within: "runs" },
};

let drawing = 0; // counts, so that a slow view does not overwrite a later one

async function render({ keepFocus = false } = {}) {
  const mine = ++drawing;
  const main = document.getElementById("main");
  const focused = keepFocus ? labelOf(document.activeElement) : null;
  redraws.clear();
  drawNavigation();
  drawSettings();
  const next = h("div");
  await VIEWS[view].draw(next);
  if (mine !== drawing) return;
  main.replaceChildren(next);
  document.title = `${VIEWS[view].title} · ${data.title}`;
  document.body.dataset.view = view;
  document.body.dataset.drawn = String(mine);
  if (focused) [...main.querySelectorAll("select, input")].find((node) => labelOf(node) === focused)?.focus();
}

const labelOf = (node) => (node?.id ? document.querySelector(`label[for="${node.id}"]`)?.textContent : null);

function drawNavigation() {
  const active = VIEWS[view].within ?? view;
  const links = Object.entries(VIEWS).filter(([, one]) => !one.within)
    .map(([name, one]) => h("a", { href: address(name), "aria-current": name === active ? "page" : null }, one.title));
  document.getElementById("views").replaceChildren(...links);
}

// The controls are created once and then only updated, so that they keep the focus.
function drawSettings() {
  const place = document.getElementById("settings");
  if (!place.firstChild) {
    const rules = selectControl("Model selection", Object.keys(data.rules), rule(), (value) => {
      remember({ rule: value });
      render();
    });
    const dark = h(
      "button",
      {
        type: "button",
        id: "theme",
        onclick: () => { setTheme(theme() === "dark" ? "light" : "dark"); themeChanged(); },
      },
    );
    place.append(rules, dark, h("p", { id: "rule-words" }));
  }
  place.querySelector("select").value = rule();
  place.querySelector("#rule-words").textContent = `${data.selections[rule()].description}.`;
  nameTheme();
}

const nameTheme = () => (document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark");

function themeChanged() {
  nameTheme();
  for (const redraw of redraws) redraw();
}

function colophon() {
  const words = say(
    `Made with sandmask ${data.version} on ${data.created}. The page is a single file and loads nothing else.`,
    data.thinned && `Curves keep at most ${data.detail.points} checkpoints of a run; selection and tables use all checkpoints.`,
    !data.detail.every_environment && "There are many runs: curves keep the training domains’ mean and worst, and mask",
    !data.detail.every_environment && "diagnostics of all tensors together.",
  );
  document.getElementById("colophon").replaceChildren(h("p", null, words));
}

async function start() {
  const stored = storedTheme();
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  if (typeof DecompressionStream === "undefined")
    throw new Error("this browser is too old; the page needs Chrome 97, Firefox 113, Safari 16.4 or newer");
  await loadReport();
  readAddress();
  colophon();
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is the state of the page
    document.getElementById("main").focus();
  });
  await render();
  addEventListener("hashchange", () => {
    readAddress();
    document.getElementById("details").close();
    scrollTo(0, 0);
    render();
  });
  systemDark.addEventListener("change", themeChanged);
  performance.mark("drawn");
}

start().catch((error) => {
  document.getElementById("main").replaceChildren(empty(`The page cannot be shown: ${error.message}.`));
  throw error;
});
