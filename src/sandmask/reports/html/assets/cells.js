// Cells of result tables: the words of the text report, set so that the eye finds the number first.

// `words` are the cell as text, `beside` with the paper's number; `cell` has the numbers.
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

// What a cell is made of: one line per trial, with the run that was selected.
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
