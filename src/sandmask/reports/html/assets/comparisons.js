// Comparisons: mean ranks, and differences to the baseline.

function drawComparisons(main) {
  const { statistics, changes } = data.selections[rule()];
  if (changes) main.append(section(
    "Before and after",
    "The change of each method against the earlier runs, on the same environments and trials.",
    wordsTable(`changes-${rule()}`, data.words[rule()].changes, 2),
  ));
  const explanation = say(
    "Whether a method is significantly better than the baseline.",
    "Differences are between runs on the same environments and trials.",
  );
  if (!statistics) {
    main.append(section(
      "Comparisons",
      explanation,
      empty(
        "There is nothing to compare under this rule: a comparison needs runs of the baseline and of another method. ",
        h("code", null, "sandmask report DIR --html FILE --baseline NAME"),
        " chooses the baseline.",
      ),
    ));
    return;
  }
  const scopes = unique(statistics.comparisons.map((one) => one.scope));
  const start = scopes.includes("all") ? ["all", ...scopes.filter((one) => one !== "all")] : scopes;
  const place = h("div");
  const redraw = () => place.replaceChildren(...comparison(statistics, choice("scope", start)));
  const control = selectControl("Dataset", start.map((one) => [one, one === "all"
    ? "All together" : one]), choice("scope", start), (value) => {
    remember({ scope: value });
    redraw();
  });
  main.append(section("Comparisons", explanation, start.length > 1 ? controls(control) : null, place));
  redraw();
}

function comparison(statistics, scope) {
  const rows = statistics.comparisons.filter((one) => one.scope === scope);
  const where = scope === "all" ? "all datasets" : scope;
  return [
    rankFigure(statistics, rows, scope, where),
    differenceFigure(statistics, rows, scope, where),
    statisticsTable(scope),
  ].filter(Boolean);
}

const RANK_NEEDS =
  "It needs at least two methods with results on the same held-out domains, and at least two of these domains";

// As `is_soup` in sandmask.selection.
function isSoup(method) {
  const [, ...spoken] = method.split(" (")[0].split(" + ");
  return spoken.some((word) => ["ensemble", "T3A", "UniDG"].includes(word) || word.endsWith(" soup"));
}

function rankFigure(statistics, rows, scope, where) {
  const critical = statistics.critical_differences[scope];
  const methods = rows.filter((one) => one.mean_rank !== null).sort((a, b) => a.mean_rank - b.mean_rank)
    .map((one) => ({ name: one.method, rank: one.mean_rank, baseline: one.method === statistics.baseline }));
  if (critical === undefined || methods.length < 2) return empty(`No rank plot for ${where}. ${RANK_NEEDS}.`);
  const unranked = rows.filter((one) => one.mean_rank === null).map((one) => one.method);
  const left = unranked.filter((method) => !isSoup(method));
  const title = `Mean ranks on ${where}, ${rule()}`;
  return figure({
    name: `ranks-${scope}-${rule()}`, title,
    note: say(
      "Bars at the right join methods that do not differ significantly (Nemenyi’s test, level 0.05):",
      `their mean ranks differ by less than ${critical.toFixed(2)}.`,
      `${RANK_NEEDS}. The test assumes independent domains; domains that share training data are not independent.`,
      left.length && `Left out because runs are missing: ${listed(left)}.`,
      left.length < unranked.length && "Soups, ensembles and adapted models are not ranked.",
    ),
    draw: ({ width, colors }) => rankChart({ title, methods, critical, width, colors }),
    table: () => ({
      header: ["method", "mean_rank", "critical_difference"],
      rows: methods.map((one) => [one.name, one.rank, critical]),
    }),
  });
}

const pText = (p) => (p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);

function differenceWords({ difference, interval, p_value: p, pairs }) {
  return `${signed(difference)}${intervalWords(interval)}, ${pText(p)}, ${plural(pairs, "pair")}`;
}

function differenceFigure(statistics, rows, scope, where) {
  const compared = rows.filter((one) => one.against_baseline).sort((a, b) =>
    b.against_baseline.difference - a.against_baseline.difference);
  if (!compared.length)
    return empty(`No method shares an environment and a trial with ${statistics.baseline} on ${where}.`);
  const title = `Difference to ${statistics.baseline} on ${where}, ${rule()}`;
  return figure({
    name: `differences-${scope}-${rule()}`, title,
    note: say(
      "Mean over (environment, trial) pairs in percent, with its 95% bootstrap interval.",
      "The p-value, in the table and under the pointer, is from a two-sided sign-flip permutation test.",
    ),
    draw: ({ width, colors }) => rowChart({
      title,
      width,
      colors,
      xLabel: `accuracy minus ${statistics.baseline}’s, in percent`,
      zeroLabel: statistics.baseline,
      rows: compared.map(({ method, against_baseline: against }) => ({
        name: method, value: against.difference, interval: against.interval, parts: [],
        label: differenceWords(against),
      })),
    }),
    table: () => ({
      header: ["method", "difference", "interval_low", "interval_high", "p_value", "pairs"],
      rows: compared.map(({ method, against_baseline: one }) => [
        method,
        one.difference,
        one.interval?.[0],
        one.interval?.[1],
        one.p_value,
        one.pairs,
      ]),
    }),
  });
}

function statisticsTable(scope) {
  const grid = data.words[rule()].statistics;
  const rows = grid.rows.filter((row) => scope === "all" || row[0] === scope);
  return wordsTable(`statistics-${rule()}`, { ...grid, rows }, 2);
}
