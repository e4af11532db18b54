// One run: its accuracy curves, settings, metrics and mask.

async function drawRun(main) {
  const runs = await loadRuns();
  const place = runs.place.get(param("id"));
  if (place === undefined) {
    main.append(section(
      "Run",
      null,
      empty("There is no such run in these records. ", h("a", { href: address("runs") }, "All runs")),
    ));
    return;
  }
  const loaded = await loadCurves(place);
  const label = `${runs.method[place]}-${runs.dataset[place]}-${runs.id[place].slice(0, 8)}`;
  const status = runs.status[place];
  const state = { done: "finished", running: "unfinished" }[status] ?? status;
  const where = runs.at[place] === null
    ? "before its first evaluation" : `step ${runs.at[place]} of ${runs.steps[place] - 1}`;
  const sentence = say(
    `${runs.dataset[place]}, ${environmentNames(runs, place)} held out; trial ${runs.trial[place]},`,
    `draw ${runs.draw[place]}. ${state[0].toUpperCase()}${state.slice(1)}, ${where}.`,
    runs.divergedAt[place] !== null && `Diverged at step ${runs.divergedAt[place]}.`,
  );
  main.append(
    h("p", { class: "trail" }, h("a", { href: address("runs") }, "All runs"), neighbours(runs, place)),
    section(
      `${runs.method[place]}`,
      sentence,
      loaded.steps.length ? accuracyFigure(runs, place, label, loaded) : empty("This run has not been evaluated yet."),
    ),
    facts(runs, place));
  const metrics = [...loaded.curves.keys()].filter((name) => !/^(in|out)\//.test(name) && !isDiagnostic(name));
  const drawn = metrics.map((name) => metricFigure(name, label, loaded)).filter(Boolean);
  if (drawn.length) main.append(section(
    "Training metrics",
    "As the run recorded them at its evaluations.",
    h("div", { class: "pair" }, drawn),
  ));
  const more = loaded.steps.length ? diagnostics(label, loaded) : null;
  if (more) main.append(more);
}

// Links to the runs before and after it in the same cell of a table.
function neighbours(runs, place) {
  const same = [...runs.id.keys()].filter((other) =>
    ["dataset", "method"].every((name) => runs[name][other] === runs[name][place]) &&
    String(runs.test[other]) === String(runs.test[place]));
  const at = same.indexOf(place);
  const link = (other, words) => other !== undefined && h("a", { href: address("run", { id: runs.id[other] }) }, words);
  return h(
    "span",
    null,
    link(same[at - 1], "‹ previous"),
    ` ${at + 1} of ${same.length} in this cell `,
    link(same[at + 1], "next ›"),
  );
}

// The curves to draw: [name in the data, words, kind].
function accuracyCurves(runs, place, curves) {
  const environments = data.overview.datasets[runs.dataset[place]].environments;
  const special = {
    "in/train": "training domains, “in”",
    "out/train": "training domains, “out”",
    "out/worst": "worst training domain, “out”",
  };
  return [...curves.keys()].filter((name) => /^(in|out)\//.test(name)).map((name) => {
    const [split, environment] = name.split("/");
    const held = runs.test[place].includes(Number(environment)) && environment !== "";
    return {
      name,
      split,
      held,
      words: special[name] ?? `${environments[Number(environment)]}${held ? " (held out)" : ""}, “${split}”`,
    };
  });
}

function accuracyFigure(runs, place, label, { steps, curves }) {
  const all = accuracyCurves(runs, place, curves);
  const training = () => choice("split", ["out", "in"]);
  const shown = () => all.filter((one) => one.held || one.split === training());
  const marks = chosenSteps(runs, place);
  const title = "Accuracy over training";
  const thinned = runs.checkpoints[place] > steps.length;
  const note = say(
    "Tables report the held-out domain’s “in” split (the solid thick line).",
    "Dashed vertical lines are the checkpoints that the rules select.",
    thinned && `The page has ${steps.length} of ${runs.checkpoints[place]} checkpoints: evenly spaced ones, and all that a`,
    thinned && "rule selects. The records have all checkpoints.",
    !data.detail.every_environment && "There are many runs, so the page keeps the training domains’ mean and worst",
    !data.detail.every_environment && "accuracy only, to a tenth of a percent.",
  );
  const seriesOf = (colors) => {
    const trained = shown().filter((one) => !one.held);
    return shown().map((one) => ({
      name: one.words, thick: one.held, points: steps.map((step, at) => [
        step,
        curves.get(one.name)[at] === null ? null : 100 * curves.get(one.name)[at],
      ]),
      color: one.held ? colors.accent : trained.length > 6 ? colors.quiet : colors.series[trained.indexOf(one)],
      dash: one.held ? (one.split === "out" ? "5 4" : null) : trained.length > 6
        ? null : DASHES[trained.indexOf(one) % 2],
    }));
  };
  const splits = [["out", "“out” split (validation)"], ["in", "“in” split (training)"]];
  const drawing = figure({
    name: `accuracy-${label}`, title,
    note,
    draw: ({ width, colors }) => {
      const series = seriesOf(colors);
      const many = series.length > 8;
      const key = many ? [
        ...series.filter((one) => one.thick),
        { ...series.find((one) => !one.thick), name: "training domains" },
      ] : series;
      return lineChart({ title, series, key, marks, yLabel: "accuracy, %", width, colors });
    },
    table: () => ({
      header: ["step", ...all.map((one) => one.words)],
      rows: steps.map((step, at) => [step, ...all.map((one) => curves.get(one.name)[at])]),
    }),
  });
  drawing.querySelector("figcaption").after(controls(
    selectControl("Training domains", splits, training(), (value) => {
      remember({ split: value });
      drawing.redraw();
    })));
  return drawing;
}

// The steps that the rules select in this run; rules that agree share a line.
function chosenSteps(runs, place) {
  const byStep = new Map();
  for (const [name, offer] of Object.entries(runs.offers)) {
    if (offer.step[place] === null) continue;
    byStep.set(offer.step[place], [...(byStep.get(offer.step[place]) ?? []), name]);
  }
  return [...byStep].sort((a, b) => a[0] - b[0]).map(([x, names]) => ({ x, name: `step ${x}: ${listed(names)}` }));
}

function metricFigure(name, label, { steps, curves }) {
  const values = curves.get(name);
  const present = values.filter((value) => value !== null);
  if (!present.length) return null;
  const log = isWide(present);
  const title = /^[\w-]+\/in\/\d+$/.test(name) ? `${name.split("/")[0]} on held-out data` : name.replaceAll("_", " ");
  return figure({
    name: `${name}-${label}`, title: title[0].toUpperCase() + title.slice(1), note: log
      ? "On a logarithmic scale." : null,
    draw: ({ width, colors }) => lineChart({
      title,
      series: [{ name: title, color: colors.series[0], points: steps.map((step, at) => [step, values[at]]) }],
      yLabel: title,
      log,
      width,
      colors,
      key: [],
    }),
    table: () => ({ header: ["step", name], rows: steps.map((step, at) => [step, values[at]]) }),
  });
}

function offerWords(offer, place, selected) {
  const values = `validation ${percent(offer.validation[place], 2)}, held out ${percent(offer.test[place], 2)}`;
  return `step ${offer.step[place]}, ${values}${selected ? "; selected" : ""}`;
}

// The command that trains a run again, in full; null for a soup, which is of many runs, and for an imported run.
function commandOf(runs, place) {
  const settings = runs.settingsOf(place);
  if (settings.soup || settings.source) return null;
  const words = ["sandmask", "train", runs.dataset[place], runs.algorithm[place]];
  const option = (name, value) => words.push(`--${name}`, String(value));
  const environments = data.overview.datasets[runs.dataset[place]].environments;
  for (const env of runs.test[place]) option("test-env", environments[env]);
  option("steps", runs.steps[place]);
  option("checkpoint-every", settings["checkpoint every"]);
  option("hparams-seed", runs.draw[place]);
  option("trial-seed", runs.trial[place]);
  option("seed", runs.seed[place]);
  for (const name of ["space", "network", "precision"]) option(name, settings[name]);
  const isSmall = ["mlp", "mnist-convnet"].includes(settings.network); // these have no pretrained weights
  if (settings.weights !== "pretrained" && !isSmall) option("weights", settings.weights);
  if (settings.average) option("average", settings.average);
  if (settings.init === "shared") words.push("--shared-init");
  for (const [name, value] of Object.entries(runs.hparamsOf(place))) option("hparam", `${name}=${value}`);
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`)).join(" ");
}

function commandBox(command) {
  const copy = h("button", {
    type: "button",
    onclick: async () => {
      getSelection().selectAllChildren(words); // without a clipboard, the reader can copy the selected text
      await navigator.clipboard?.writeText(command).then(() => (copy.textContent = "Copied"), () => null);
    },
  }, "Copy");
  const words = h("code", null, command);
  return h("div", { class: "command" }, h("h3", null, "Train it again"), h("pre", { tabindex: "0" }, words), copy);
}

function facts(runs, place) {
  const pairs = (entries) => h(
    "dl",
    { class: "facts" },
    entries.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value)))),
  );
  const command = commandOf(runs, place);
  const chosen = Object.entries(runs.offers).filter(([, offer]) => offer.step[place] !== null)
    .map(([name, offer]) => [
      name,
      offerWords(offer, place, selectedRuns(name).has(runs.id[place])),
    ]);
  return section("Settings of the run", null, command && commandBox(command), h("div", { class: "pair" },
    h(
      "div",
      null,
      h("h3", null, "Hyperparameters"),
      pairs(Object.entries(runs.hparamsOf(place)).map(([name, value]) => [name, short(value)])),
    ),
    h(
      "div",
      null,
      h("h3", null, "Settings"),
      pairs([
        ["run", runs.id[place]],
        ["seed", runs.seed[place]],
        ["checkpoints", runs.checkpoints[place]],
        ...Object.entries(runs.settingsOf(place)),
      ]),
    ),
    chosen.length ? h("div", null, h("h3", null, "Selected by each rule"), pairs(chosen)) : null));
}
