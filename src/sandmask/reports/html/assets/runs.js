// Runs: a table of all runs, with a search.

const RUN_COLUMNS = [
  "Method",
  "Dataset",
  "Held out",
  "Trial",
  "Draw",
  "Status",
  "Step",
  "Validation",
  "Held-out accuracy",
];

async function drawRuns(main) {
  const runs = await loadRuns();
  const explanation = say(
    "All runs, and all averages of their weights. Validation and held-out accuracy, in percent, are from the checkpoint",
    `that ${rule()} selects. Open a run to see its curves.`,
  );
  const place = h("div");
  const options = (name, values) => ["", ...values].map((value) => [value, value || "Any"]);
  const datasets = Object.keys(data.overview.datasets);
  const statuses = unique(runs.status);
  const set = (name) => (value) => {
    remember({ [name]: value });
    redraw();
  };
  const redraw = () => place.replaceChildren(runTable(runs));
  main.append(section("Runs", explanation,
    controls(
      datasets.length > 1 ? selectControl(
        "Dataset",
        options("dataset", datasets),
        param("dataset"),
        set("dataset"),
      ) : null,
      selectControl("Method", options("method", unique(runs.method).sort()), param("method"), set("method")),
      statuses.length > 1 ? selectControl("Status", options("status", statuses), param("status"), set("status")) : null,
      searchControl("Find", param("q"), "name, domain or id", set("q"))),
    place));
  redraw();
}

function runTable(runs) {
  const offers = runs.offers[rule()];
  const [dataset, method, status, query] = ["dataset", "method", "status", "q"].map((name) => param(name));
  const wordsOf = (place) =>
    `${runs.method[place]} ${runs.dataset[place]} ${environmentNames(runs, place)} ${runs.id[place]}`;
  const places = [...runs.id.keys()].filter((place) =>
    (!dataset || runs.dataset[place] === dataset) && (!method || runs.method[place] === method) && (!status
      || runs.status[place] === status) &&
    (!query || matches(query, wordsOf(place))));
  if (!places.length) return empty("No run matches.");
  const count = (value) => ({ text: value === null ? "-" : String(value), value });
  const rows = places.map((place) => Object.assign([
    {
      text: runs.method[place],
      get node() { return h("a", { href: address("run", { id: runs.id[place] }) }, runs.method[place]); },
    },
    { text: runs.dataset[place] },
    { text: environmentNames(runs, place) },
    count(runs.trial[place]),
    count(runs.draw[place]),
    {
      text: runs.status[place],
      get node() { return h("span", { class: `status ${runs.status[place]}` }, runs.status[place]); },
    },
    count(runs.at[place]),
    ...[offers.validation[place], offers.test[place]].map((value) => ({ text: percent(value, 2), value })),
  ], { id: runs.id[place] }));
  const columns = RUN_COLUMNS.map((title, place) => ({ title, numeric: place > 2 && place !== 5 }));
  return dataTable({
    name: "runs", title: `${plural(places.length, "row")}, ${rule()}`, columns, rows, limit: 100,
    files: { table: (shown) => ({
      header: ["run", ...RUN_COLUMNS],
      rows: shown.map((row) => [row.id, ...row.map((cell) => cell.value ?? cell.text)]),
    }) },
  });
}
