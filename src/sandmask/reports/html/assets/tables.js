// Tables: one per dataset, and the averages.

const AVERAGES = "Averages";

function drawTables(main) {
  const selection = data.selections[rule()];
  const names = Object.keys(selection.datasets);
  const metrics = ["accuracy", ...Object.keys(selection.metrics ?? {}), ...(selection.confusions ? ["confusion"] : [])];
  const explanation = say(
    "Accuracy on the held-out domain in percent: mean ± standard error over trials. Click a heading to sort, or a",
    "number to see its runs. † marks cells with runs that diverged.", data.bestNote,
  );
  if (!names.length) {
    main.append(section(
      "Tables",
      explanation,
      empty("Nothing can be selected by this rule.", h("ul", null, selection.notes.map((note) => h("li", null, note)))),
    ));
    return;
  }
  const place = h("div");
  const all = ["", AVERAGES, ...names];
  const redraw = () => place.replaceChildren(
    ...tablesOf(selection, choice("metric", metrics), choice("dataset", all), param("q")));
  const set = (name) => (value) => {
    remember({ [name]: value === true ? "1" : value === false ? "0" : value });
    redraw();
  };
  main.append(
    section("Tables", explanation,
      controls(
        selectControl("Dataset", all.map((name) => [name, name || "All"]), choice("dataset", all), set("dataset")),
        metrics.length > 1
          && selectControl("Metric", metrics.map((name) => [name, metricTitle(selection, name)]),
            choice("metric", metrics), set("metric")),
        searchControl("Methods", param("q"), "mask, erm", set("q")),
        hasPaper(selection) && switchControl("The paper’s numbers", withPaper(), set("paper")),
        hasIntervals(selection) && switchControl("95% intervals", withIntervals(), set("ci"))),
      place));
  redraw();
}

const someCell = (selection, has) => [...Object.values(selection.datasets), selection.averages].some((table) =>
  table.rows.some((row) => Object.values(row.cells).some(has)));
const hasPaper = (selection) => someCell(selection, (cell) => cell.paper);
// With the usual three trials, no cell has an interval.
const hasIntervals = (selection) => someCell(selection, (cell) => cell.interval);

const metricTitle = (selection, name) => selection.metrics?.[name]?.title ?? name[0].toUpperCase() + name.slice(1);

function tablesOf(selection, metric, dataset, query) {
  if (metric === "accuracy") return tablesShown(selection, dataset, query);
  if (metric === "confusion") return confusionTables(selection, dataset, query);
  const tables = Object.entries(selection.metrics[metric].datasets).filter(([name]) => !dataset || name === dataset)
    .map(([name, table]) => resultTable(`${name} ${metric}`, `metric:${metric}:${name}`, table, query));
  return tables.length ? tables : [empty("No run of this dataset recorded the metric.")];
}

function confusionTables(selection, dataset, query) {
  const found = selection.confusions.filter((one) => (!dataset || one.dataset === dataset) && matches(query, one.method));
  if (!found.length) return [empty("No run recorded it, or no method matches.")];
  return found.map((one) => {
    const grid = data.words[rule()][`confusion:${one.method}:${one.dataset}`];
    return wordsTable(`confusion-${one.method}-${one.dataset}-${rule()}`, grid, 1);
  });
}

// A table of words and numbers, as in the text report. Numbers begin in column `first`.
function wordsTable(name, grid, first) {
  const value = (words) => (words === "-" ? null : parseFloat(words.replace("<", "")));
  const columns = grid.header.map((title, place) => ({ title, numeric: place >= first }));
  const rows = grid.rows.map((row) => row.map((words, place) => ({
    text: words,
    value: place >= first ? value(words) : words,
  })));
  return dataTable({
    name, title: grid.title, columns, rows, notes: grid.notes,
    files: { grid: (shown) => ({ ...grid, rows: shown.map((row) => row.map((cell) => cell.text)) }) },
  });
}

function tablesShown(selection, dataset, query) {
  const names = Object.keys(selection.datasets).filter((name) => !dataset || name === dataset);
  const tables = names.map((name) => resultTable(name, `dataset:${name}`, selection.datasets[name], query));
  if (selection.averages && (!dataset
    || dataset === AVERAGES)) tables.push(resultTable(AVERAGES, "averages", selection.averages, query));
  if (!dataset) tables.push(...selection.notes.map((note) => h("p", { class: "flag" }, note)));
  return tables;
}

function resultTable(name, key, table, query) {
  const words = data.words[rule()][key];
  const grid = () => (withPaper() ? words.paper : words);
  const places = words.rows.map((_, place) => place).filter((place) => matches(query, words.rows[place][0]));
  const title = words.title;
  if (!places.length) return h("div", { class: "table" }, h("h3", null, title), empty(`No method matches “${query}”.`));
  const cellAt = (place, column) => (column < table.columns.length
    ? table.rows[place].cells[table.columns[column]] : table.rows[place].average);
  const columns = words.header.map((header, place) => ({ title: header, numeric: place > 0 }));
  const rows = places.map((place) => {
    const method = words.rows[place][0];
    const cells = words.header.slice(1).map((header, column) => {
      const cell = cellAt(place, column);
      const heading = `${method}, ${name === AVERAGES ? "" : `${name} `}${header}`;
      return resultCell({
        words: words.rows[place][column + 1],
        beside: words.paper.rows[place][column + 1],
        cell,
        best: cell.best,
        open: key !== "averages" && cell.trials?.length ? () => openCell(heading, cell) : null,
      });
    });
    return Object.assign([{ text: method }, ...cells], { method });
  });
  return dataTable({
    name: `${name}-${rule()}`, title, columns, rows, notes: grid().notes,
    files: {
      grid: (shown) => ({ ...grid(), rows: shown.map((row) => row.map((cell) => cell.text)) }),
      table: (shown) => tidy(shown, words.header),
    },
  });
}

// Unrounded numbers, a line for each cell.
function tidy(rows, header) {
  const lines = rows.flatMap((row) =>
    row.slice(1).map(({ cell }, place) => [
      row.method, header[place + 1], cell.mean, cell.error, cell.interval?.[0], cell.interval?.[1],
      cell.runs, cell.expected_runs, cell.diverged_runs, cell.paper?.mean, cell.paper?.error, cell.difference,
      cell.before?.mean, cell.before?.error, cell.before?.change,
    ]));
  return {
    header: [
      "method",
      "column",
      "mean",
      "standard_error",
      "interval_low",
      "interval_high",
      "runs",
      "expected_runs",
      "diverged_runs",
      "paper",
      "paper_standard_error",
      "difference_to_paper",
      "before",
      "before_standard_error",
      "change",
    ],
    rows: lines,
  };
}

// Cells of result tables: the text of the report, in which the number stands out.

// `words` is the text of the cell, `beside` the same with the paper's number, and `cell` has the numbers.
function resultCell({ words, beside, cell, best, open }) {
  const [, number, rest] = words.match(/^(\d+\.\d(?: ± \d+\.\d)?†?)?(.*)$/s);
  const paper = beside.slice(words.length).trim();
  const parts = [
    number && h(best ? "strong" : "span", { class: "number" }, number),
    rest && h("span", { class: number ? "progress below" : "progress" }, rest.trim()),
    withIntervals() && cell.interval && h("small", null, intervalText(cell.interval)),
    withPaper() && paper && h("small", { class: "paper" }, paper),
  ];
  return {
    text: withPaper() ? beside : words,
    value: cell.mean,
    cell,
    node: open ? h(
      "button",
      { type: "button", class: "cell", title: hint(cell), onclick: open },
      parts,
    ) : h("span", { class: "cell", title: hint(cell) }, parts),
  };
}

const intervalText = ([low, high]) => `${low.toFixed(1)} to ${high.toFixed(1)}`;

function hint(cell) {
  const lines = [];
  if (cell.interval) lines.push(`95% bootstrap interval ${intervalText(cell.interval)}`);
  if (cell.expected_runs) lines.push(`${cell.runs} of ${plural(cell.expected_runs, "run")}`);
  if (cell.diverged_runs) lines.push(`${cell.diverged_runs} diverged`);
  return lines.join("\n") || null;
}

// A dialog with the content of a cell: one line per trial, with the run that was selected.
function openCell(title, cell) {
  const dialog = document.getElementById("details");
  const close = () => dialog.close();
  const columns = [
    "Trial",
    "Run",
    "Draw",
    "Step",
    "Validation",
    "Test",
  ].map((name, place) => ({ title: name, numeric: place !== 1 }));
  const rows = cell.trials.map((trial) => {
    const selected = trial.run !== undefined;
    const run = selected ? h(
      "a",
      { href: address("run", { id: trial.run }), onclick: close },
      trial.run.slice(0, 8),
    ) : "none";
    return [
      { text: String(trial.trial_seed), value: trial.trial_seed },
      { text: selected ? trial.run : "none", node: run },
      ...[trial.hparams_seed, trial.step].map((value) => ({
        text: value === undefined ? "-" : String(value),
        value: value ?? null,
      })),
      ...[trial.validation, trial.test].map((value) => ({ text: percent(value, 2), value: value ?? null })),
    ];
  });
  const missing = cell.trials.flatMap((trial) => trial.missing.map((gap) =>
    `trial ${gap.trial_seed} draw ${gap.hparams_seed}${gap.why ? ` (${gap.why})` : ""}`));
  const facts = [
    cell.mean !== null && `Mean ${percent(cell.mean, 2)}`,
    cell.error !== null && `standard error ${percent(cell.error, 2)}`,
    cell.interval && `95% bootstrap interval ${cell.interval.map((value) => value.toFixed(2)).join(" to ")}`,
    cell.paper && `the paper has ${cell.paper.mean}${cell.paper.error === null ? "" : ` ± ${cell.paper.error}`}`,
  ].filter(Boolean);
  dialog.replaceChildren(
    h(
      "div",
      { class: "dialog-head" },
      h("h2", { id: "details-title" }, title),
      h("button", { type: "button", class: "close", "aria-label": "Close", onclick: close }, "×"),
    ),
    h("p", null, facts.length ? `${facts.join(", ")}.` : "There is no number yet."),
    dataTable({ name: "cell", title: "Selected in each trial", columns, rows, sortable: false }),
    missing.length ? h(
      "details",
      null,
      h("summary", null, `${plural(missing.length, "run")} missing`),
      h("ul", { class: "notes" }, missing.map((one) => h("li", null, one))),
    ) : "",
  );
  dialog.showModal();
}
