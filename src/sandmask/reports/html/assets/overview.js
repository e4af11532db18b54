// Overview: what was run, which methods are best, and what is missing.

function drawOverview(main) {
  main.append(whatWasRun(), bestSection(), missingSection());
}

function whatWasRun() {
  const { runs, methods, status, datasets } = data.overview;
  const tile = (value, words) => h(
    "div",
    { class: "tile" },
    h("dd", null, value.toLocaleString("en")),
    h("dt", null, words),
  );
  const tiles = [
    tile(runs, "runs"),
    tile(methods, methods === 1 ? "method" : "methods"),
    tile(Object.keys(datasets).length, Object.keys(datasets).length === 1 ? "dataset" : "datasets"),
    tile(status.done ?? 0, "finished"),
  ];
  if (status.diverged) tiles.push(tile(status.diverged, "diverged"));
  if (status.pruned) tiles.push(tile(status.pruned, "pruned"));
  if (status.running) tiles.push(tile(status.running, "unfinished"));
  const names = Object.keys(datasets);
  const join = (values) => (values.length > 6 ? `${values[0]} to ${values[values.length - 1]}` : values.join(", "));
  const columns = [
    "Dataset",
    "Environments",
    "Methods",
    "Trials",
    "Draws",
    "Runs",
    "Steps",
    "Network",
    "Precision",
    "Space",
  ]
    .map((title, place) => ({ title, numeric: place > 1 && place < 7 }));
  const cell = (value) => ({ text: value.toLocaleString("en"), value });
  const rows = names.map((name) => {
    const one = datasets[name];
    return [
      { text: name },
      { text: join(one.environments), value: one.environments.length },
      cell(one.methods),
      cell(one.trials),
      cell(one.draws),
      cell(one.runs),
      { text: join(one.steps), value: one.steps[0] },
      { text: join(one.network) },
      { text: join(one.precision) },
      { text: join(one.space) },
    ];
  });
  return section(
    "What was run",
    "Every number on this page is computed from these runs.",
    h("dl", { class: "tiles" }, tiles), dataTable({ name: "datasets", title: "Datasets", columns, rows }));
}

// The best and the second best row for a dataset (null for the average over datasets). Averages over fewer columns than
// others are left out, because they cannot be compared. There is no best of averages over different columns.
function bestOf(selection, dataset) {
  const cellOf = (row) => (dataset === null ? row.average : row.cells[dataset]);
  const found = (selection.averages?.rows ?? []).filter((row) => cellOf(row)?.mean != null);
  const columns = (row) => cellOf(row).parts?.found ?? 1;
  const widest = Math.max(...found.map(columns));
  const ranked = found.filter((row) => columns(row) === widest).sort((a, b) => cellOf(b).mean - cellOf(a).mean);
  const over = new Set(ranked.map((row) => JSON.stringify(cellOf(row).parts?.columns ?? null)));
  return over.size > 1 ? { cellOf } : { best: ranked[0], next: ranked[1], cellOf };
}

function bestCell(name, dataset) {
  const selection = data.selections[name];
  const { best, next, cellOf } = bestOf(selection, dataset);
  const target = address("tables", { rule: name, dataset: dataset ?? "Averages" });
  if (!best) return { text: "-", value: null };
  const grid = data.words[name].averages;
  const words = grid.rows.find((row) => row[0] === best.method)[dataset === null
    ? grid.header.length - 1 : grid.header.indexOf(dataset)];
  const lead = next && cellOf(best).mean - cellOf(next).mean;
  const chance = dataset === null ? undefined : selection.averages.chances[dataset];
  const behind = cellOf(best).mean.toFixed(1) <= chance ? `not above chance, ${chance.toFixed(1)}` : next
    ? (cellOf(best).mean.toFixed(1) === cellOf(next).mean.toFixed(1)
      ? `equal to ${next.method}` : `${lead.toFixed(1)} above ${next.method}`) : "the only method";
  return {
    text: `${best.method} ${words}`,
    value: cellOf(best).mean,
    node: h(
      "a",
      { class: "best", href: target },
      h(cellOf(best).best ? "strong" : "span", null, best.method),
      " ",
      h("span", { class: "number" }, words),
      h("small", null, behind),
    ),
  };
}

function bestSection() {
  const names = Object.keys(data.rules);
  const datasets = Object.keys(data.overview.datasets).filter((name) => names.some((one) =>
    data.selections[one].datasets[name]));
  const columns = [
    { title: "Dataset" },
    ...names.map((name) => ({ title: name, numeric: true, hint: data.selections[name].description })),
  ];
  const ordered = Object.keys(data.selections[names[0]].datasets).concat(datasets).filter((name, place, all) =>
    all.indexOf(name) === place);
  const rows = ordered.map((dataset) => [{ text: dataset }, ...names.map((name) => bestCell(name, dataset))]);
  if (rows.length > 1) rows.push([{ text: "Average" }, ...names.map((name) => bestCell(name, null))]);
  const notes = names.flatMap((name) => data.selections[name].notes.map((note) => `${name}: ${note}`));
  const peeking = names.filter((name) => data.rules[name].usesTestData);
  return section("Best method",
    say(
      "Highest accuracy on the held-out domains, in percent, averaged over them, under each selection rule.",
      peeking.length && `Rules that use the held-out domain (${listed(peeking)}) are a reference, not a way to select models.`,
      "Leads smaller than the standard errors are not significant; see the comparisons.", data.bestNote,
    ),
    dataTable({ name: "best", title: "Best method of each dataset and selection rule", columns, rows, notes }));
}

function missingSection() {
  const name = rule();
  const selection = data.selections[name];
  const explanation = say(
    `How many of the expected runs are finished under ${name}.`,
    "Every draw and trial that a run on the dataset has is expected, unless the command sets their numbers.",
  );
  const notes = selection.notes.map((note) => h("li", null, note));
  if (!selection.averages) return section(
    "What is missing",
    explanation,
    empty("There is nothing to count: ", notes.length ? h("ul", null, notes) : "no runs."),
  );
  const datasets = selection.averages.columns;
  const lacks = (cell) => cell.runs < cell.expected_runs;
  const incomplete = selection.averages.rows.flatMap((row) => datasets.map((one) => row.cells[one])).filter(lacks);
  const columns = [{ title: "Algorithm" }, ...datasets.map((title) => ({ title, numeric: true }))];
  const waiting = selection.averages.rows.filter((row) => datasets.some((one) => lacks(row.cells[one])));
  const rows = waiting.map((row) => [
    { text: row.method },
    ...datasets.map((one) => coverage(row.cells[one])),
  ]);
  const absent = datasets.map((one) => [
    one,
    selection.averages.rows.filter((row) => !row.cells[one].expected_runs).map((row) => row.method),
  ]).filter(([, methods]) => methods.length);
  const gaps = datasets.flatMap((one) => data.words[name][`dataset:${one}`].notes.map((note) => `${one}: ${note}`));
  const message = incomplete.length
    ? `${plural(incomplete.length, "cell")} of this table ${incomplete.length === 1
      ? "lacks" : "lack"} runs. Numbers that lack runs are marked in all tables.`
    : absent.length ? "Nothing is missing where a method has runs, but some methods have none on some datasets."
      : "Nothing is missing: every run that the tables expect is finished.";
  const all = [
    ...selection.notes,
    ...gaps,
    ...absent.map(([one, methods]) => `${one}: no runs of ${listed(methods)}.`),
  ];
  return section("What is missing", explanation, h("p", { class: rows.length || absent.length ? "flag" : "fine" }, message),
    rows.length ? dataTable({ name: "missing", title: "Methods with missing runs", columns, rows, notes: all })
      : noteList(all));
}

function coverage(cell) {
  if (!cell.expected_runs) return { text: "-", value: null };
  const share = cell.runs / cell.expected_runs;
  const text = `${cell.runs}/${cell.expected_runs}${cell.diverged_runs ? "†" : ""}`;
  return {
    text,
    value: share,
    node: h(
      "span",
      { class: "coverage" },
      h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: `width:${(100 * share).toFixed(1)}%` })),
      text,
    ),
  };
}
