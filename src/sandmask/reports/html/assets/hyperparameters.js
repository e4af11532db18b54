// Hyperparameters: each run's accuracy against one of them.

async function drawHyperparameters(main) {
  const runs = await loadRuns();
  const explanation = say(
    `Each point is a run, at the checkpoint that ${rule()} would select.`,
    "Points in the accent colour are the runs that the tables report. Click a point to open the run.",
  );
  const datasets = Object.keys(data.overview.datasets);
  const dataset = choice("dataset", datasets);
  const methods = unique(runs.method.filter((_, place) => runs.dataset[place] === dataset)).sort();
  const method = choice("method", methods);
  const environments = data.overview.datasets[dataset].environments;
  const env = choice("env", ["", ...environments.map((_, place) => String(place))]);
  const offers = runs.offers[rule()];
  const places = [...runs.id.keys()].filter((place) =>
    runs.dataset[place] === dataset && runs.method[place] === method && offers.test[place] !== null &&
    (env === "" || String(runs.test[place][0]) === env));
  const names = unique(places.flatMap((place) => Object.keys(runs.hparamsOf(place))))
    .filter((name) => new Set(places.map((place) => runs.hparamsOf(place)[name])).size > 1);
  const against = choice("y", ["test", "validation"]);
  const set = (name) => (value) => {
    remember({ [name]: value });
    render({ keepFocus: true });
  };
  const bar = controls(
    selectControl("Dataset", datasets, dataset, set("dataset")),
    selectControl("Method", methods, method, set("method")),
    selectControl(
      "Held out",
      [["", "Any"], ...environments.map((name, place) => [String(place), name])],
      env,
      set("env"),
    ),
    names.length ? selectControl("Hyperparameter", names, choice("x", names), set("x")) : null,
    selectControl("Against", [["test", "held-out accuracy"], ["validation", "validation value"]], against, set("y")));
  let content = null;
  if (!places.length) content = empty("There are no finished runs of this choice that this rule can judge.");
  else if (!names.length)
    content = empty(
      say(
        `All ${plural(places.length, "run")} of ${method} here have the same hyperparameters: nothing to plot.`,
        "A sweep with several draws fills this figure.",
      ),
    );
  else content = scatterFigure(runs, places, { dataset, method, name: choice("x", names), against, offers });
  main.append(section("Hyperparameters", explanation, bar, content));
}

function scatterFigure(runs, places, { dataset, method, name, against, offers }) {
  const selected = selectedRuns(rule());
  const title = `${name} against ${against === "test"
    ? "held-out accuracy" : "validation value"}: ${method} on ${dataset}, ${rule()}`;
  const exact = places.filter((place) => runs.hparamsOf(place)[name] !== undefined && offers[against][place] !== null);
  const values = exact.map((place) => runs.hparamsOf(place)[name]);
  const log = isWide(values);
  const few = new Set(values).size <= 6;
  const spread = few ? (log ? 0.03 : 0.02 * (Math.max(...values) - Math.min(...values))) : 0;
  const points = exact.map((place, at) => {
    const shift = spread * (((place * 0.618034) % 1) - 0.5) * 2; // points of equal value lie side by side
    return {
      x: log ? values[at] * (1 + shift) : values[at] + shift,
      y: offers[against][place],
      strong: selected.has(runs.id[place]),
      lines: [
        `${name} ${short(values[at])}`,
        `${against === "test" ? "held out" : "validation"} ${percent(offers[against][place], 2)}`,
        `${environmentNames(runs, place)}, trial ${runs.trial[place]}, draw ${runs.draw[place]}`,
      ],
      open: () => (location.hash = address("run", { id: runs.id[place] })),
    };
  });
  return figure({
    name: `hyperparameter-${name}-${method}-${dataset}-${rule()}`, title,
    note: `${plural(points.length, "run")}.${few ? " Equal values are spread a little sideways." : ""}`,
    draw: ({ width, colors }) => scatterChart({
      title, points, log, width, colors, xLabel: name, yLabel: against === "test"
        ? "held-out accuracy, %" : "validation value, %",
      medians: few || points.length < 30 ? [] : medians(points), pointName: "a run", strongName: "selected",
    }),
    table: () => ({
      header: ["run", "held_out", "trial", "draw", name, "validation", "test", "selected"],
      rows: exact.map((place, at) => [
        runs.id[place],
        environmentNames(runs, place),
        runs.trial[place],
        runs.draw[place],
        values[at],
        offers.validation[place],
        offers.test[place],
        Number(selected.has(runs.id[place])),
      ]),
    }),
  });
}

const median = (sorted) => (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;

// The median of each tenth of the points, in order of x.
function medians(points) {
  const sorted = [...points].sort((a, b) => a.x - b.x);
  return Array.from({ length: 10 }, (_, part) => {
    const some = sorted.slice(Math.floor((part * sorted.length) / 10), Math.floor(((part + 1) * sorted.length) / 10));
    return [median(some.map((one) => one.x)), median(some.map((one) => one.y).sort((a, b) => a - b))];
  });
}

// The runs that a rule's tables report.
const selectedRuns = (name) =>
  new Set(Object.values(data.selections[name].datasets).flatMap((table) => table.rows)
    .flatMap((row) => Object.values(row.cells)).flatMap((cell) => cell.trials ?? []).map((trial) => trial.run));

const environmentNames = (runs, place) =>
  runs.test[place].map((env) => data.overview.datasets[runs.dataset[place]].environments[env]).join(" + ");
