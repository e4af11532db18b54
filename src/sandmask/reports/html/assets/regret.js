// Selection regret: what the oracle reached minus what the rule reached.

function drawRegret(main) {
  const explanation = say(
    "The cost of model selection: the oracle’s accuracy minus the rule’s, on the same held-out domains and trials,",
    "in percent. It can be negative, because the oracle considers only the last checkpoint of a run.",
  );
  main.append(section("Selection regret", explanation, regretContent(rule())));
}

function regretContent(name) {
  if (!data.rules.oracle)
    return empty("This page was made without the oracle. Make it with ", h("code", null, "--selection all"), ".");
  if (name === "oracle") {
    const others = Object.keys(data.rules).filter((one) => one !== "oracle");
    const links = others.map((one) => h("li", null, h("a", { href: address("regret", { rule: one }) }, one)));
    return empty("The oracle has no regret. Choose another rule: ", h("ul", null, links));
  }
  const entries = data.regrets.filter((one) => one.rule === name);
  if (!entries.length) return empty("There is no trial with runs selected both by the oracle and by this rule.");
  const datasets = unique(entries.map((one) => one.dataset));
  const place = h("div");
  const redraw = () => place.replaceChildren(regretFigure(entries, choice("dataset", datasets)), regretTable());
  const control = selectControl("Dataset", datasets, choice("dataset", datasets), (value) => {
    remember({ dataset: value });
    redraw();
  });
  redraw();
  return [datasets.length > 1 ? controls(control) : null, place];
}

const intervalWords = (interval) => (interval ? ` (${interval.map((value) => signed(value)).join(" to ")})` : "");

function regretFigure(entries, dataset) {
  const shown = entries.filter((one) => one.dataset === dataset).sort((a, b) => a.mean - b.mean);
  const title = `Regret on ${dataset}, ${rule()}`;
  return figure({
    name: `regret-${dataset}-${rule()}`, title,
    note: say(
      "Large dots: the mean over (environment, trial) pairs with its 95% bootstrap interval.",
      "Small dots: each held-out environment.",
    ),
    draw: ({ width, colors }) => rowChart({
      title, width, colors, xLabel: "oracle minus selected, in percent", zeroLabel: "no regret",
      rows: shown.map((one) => ({
        name: one.method,
        value: one.mean,
        interval: one.interval,
        label: `${signed(one.mean)}${intervalWords(one.interval)}, ${plural(one.pairs, "pair")}`,
        parts: Object.entries(one.environments).map(([env, value]) => ({ value, label: `${env}: ${signed(value)}` })),
      })),
    }),
    table: () => ({
      header: ["method", "environment", "regret"],
      rows: shown.flatMap((one) => [
        [one.method, "mean", one.mean],
        ...Object.entries(one.environments).map(([env, value]) => [one.method, env, value]),
      ]),
    }),
  });
}

function regretTable() {
  const names = Object.keys(data.rules).filter((one) => data.regrets.some((entry) => entry.rule === one));
  const keys = unique(data.regrets.map((one) => JSON.stringify([one.dataset, one.method])));
  const columns = [{ title: "Algorithm" }, { title: "Dataset" }, ...names.map((title) => ({ title, numeric: true }))];
  const rows = keys.map((key) => {
    const [dataset, method] = JSON.parse(key);
    const cells = names.map((name) => {
      const found = data.regrets.find((one) => one.rule === name && one.dataset === dataset && one.method === method);
      return found ? {
        text: signed(found.mean),
        value: found.mean,
        node: h(
          "span",
          { title: `95% interval${intervalWords(found.interval)}, ${plural(found.pairs, "pair")}` },
          signed(found.mean),
        ),
      } : { text: "-", value: null };
    });
    return [{ text: method }, { text: dataset }, ...cells];
  });
  return dataTable({
    name: "regret",
    title: "Regret of each rule",
    columns,
    rows,
    notes: ["Oracle minus selected in percent, mean over (environment, trial) pairs."],
  });
}
