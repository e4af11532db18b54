// Charts. Each function returns an SVG and its `hits`, the places with values to read: {x, y, lines, open}.

// Curves over steps. `marks` are vertical lines: {x, name}.
function lineChart({
  title,
  series,
  marks = [],
  xLabel = "step",
  yLabel,
  domain,
  log = false,
  width,
  colors,
  key = true,
}) {
  const entries = Array.isArray(key) ? [...key] : key ? [...series] : [];
  for (const mark of marks) entries.push({ name: mark.name, color: colors.muted, dash: "3 3" });
  const { group, height: above } = legend(entries, width, 8, colors);
  const top = above + 22;
  const height = top + Math.min(300, Math.max(190, width * 0.4)) + 44;
  const box = { left: 48, right: width - 14, top, bottom: height - 44 };
  const svg = canvas(width, height, title, colors);
  const xs = series.flatMap((one) => one.points.map((point) => point[0]));
  const ys = series.flatMap((one) => one.points.map((point) => point[1])).filter((value) => value !== null);
  const x = linear(extent(xs, [], 0.01), [box.left, box.right]);
  const y = log
    ? logarithmic(extent(ys, [], 0).map((v, k) => (k ? v * 1.1 : v / 1.1)), [box.bottom, box.top])
    : linear(domain ?? extent(ys), [box.bottom, box.top]);
  axes({ svg, x, y, box, xLabel, yLabel, colors });
  for (const { x: step } of marks)
    svg.append(s(
      "path",
      { d: `M${x(step)} ${box.top}V${box.bottom}`, stroke: colors.muted, "stroke-dasharray": "3 3" },
    ));
  for (const one of series) {
    const points = one.points.map(([step, value]) => [x(step), value === null ? null : y(value)]);
    svg.append(
      s("path", {
        d: pathOf(points), fill: "none", stroke: one.color, "stroke-width": one.thick ? 2.5 : 1.5,
        "stroke-dasharray": one.dash, "stroke-linejoin": "round", "stroke-linecap": "round",
      }),
    );
  }
  svg.append(group);
  return { svg, hits: series.length > 8 ? pointHits(series, x, y) : stepHits(series, x, box), box };
}

const pointHits = (series, x, y) =>
  series.flatMap((one) =>
    one.points
      .filter((point) => point[1] !== null)
      .map(([step, value]) => ({ x: x(step), y: y(value), lines: [`step ${step}`, `${one.name}: ${short(value)}`] })),
  );

function stepHits(series, x, box) {
  const steps = unique(series.flatMap((one) => one.points.map((point) => point[0]))).sort((a, b) => a - b);
  const found = series.map((one) => [one.name, new Map(one.points)]);
  return steps.map((step) => ({
    x: x(step),
    y: null,
    top: box.top,
    bottom: box.bottom,
    lines: [`step ${step}`, ...found.map(([name, values]) => `${name}: ${short(values.get(step))}`)],
  }));
}

// Points ({x, y, lines, open, strong}), a few of them strong, and a line of medians.
function scatterChart({ title, points, xLabel, yLabel, log, medians, strongName, pointName, width, colors }) {
  const entries = [{ name: pointName, color: colors.quiet, dot: true }];
  if (points.some((point) => point.strong)) entries.push({ name: strongName, color: colors.accent, dot: true });
  if (medians.length) entries.push({ name: "median of each tenth", color: colors.ink, thick: true });
  const { group, height: above } = legend(entries, width, 8, colors);
  const top = above + 22;
  const height = top + Math.min(360, Math.max(220, width * 0.45)) + 44;
  const box = { left: 48, right: width - 14, top, bottom: height - 44 };
  const svg = canvas(width, height, title, colors);
  const xs = points.map((point) => point.x);
  const stretch = (range) => (log ? [range[0] / 1.15, range[1] * 1.15] : range);
  const x = (log ? logarithmic : linear)(stretch(extent(xs, [], log ? 0 : 0.04)), [box.left, box.right]);
  const y = linear(extent(points.map((point) => point.y)), [box.bottom, box.top]);
  axes({ svg, x, y, box, xLabel, yLabel, colors });
  const dots = (some) => some.map((point) => `M${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}h0`).join("");
  const dot = (some, color, size, opacity) =>
    s(
      "path",
      { d: dots(some), stroke: color, "stroke-width": size, "stroke-linecap": "round", "stroke-opacity": opacity },
    );
  const weak = points.filter((point) => !point.strong);
  svg.append(dot(weak, colors.quiet, 5.5, weak.length > 300 ? 0.45 : 0.75));
  if (medians.length)
    svg.append(s(
      "path",
      { d: pathOf(medians.map(([a, b]) => [x(a), y(b)])), fill: "none", stroke: colors.ink, "stroke-width": 2 },
    ));
  svg.append(dot(points.filter((point) => point.strong), colors.accent, 8, 1), group);
  return { svg, box, hits: points.map((point) => ({ ...point, x: x(point.x), y: y(point.y) })) };
}

// One row per method: a dot with its interval, and smaller dots for the parts.
function rowChart({ title, rows, xLabel, zeroLabel, width, colors }) {
  const left = Math.min(width * 0.42, 24 + Math.max(...rows.map((row) => wordWidth(row.name))));
  const high = 30;
  const top = 32;
  const box = { left, right: width - 18, top, bottom: top + rows.length * high + 6 };
  const svg = canvas(width, box.bottom + 44, title, colors);
  const values = rows.flatMap((row) => [row.value, ...(row.interval ?? []), ...row.parts.map((part) => part.value)]);
  const x = linear(extent(values, [0], 0.06), [box.left, box.right]);
  axes({ svg, x, y: null, box, xLabel, colors });
  svg.append(
    s("path", { d: `M${x(0)} ${top - 8}V${box.bottom}`, stroke: colors.muted, "stroke-dasharray": "3 3" }),
    text(x(0), top - 13, zeroLabel, colors.muted, { "text-anchor": "middle" }),
  );
  const hits = [];
  rows.forEach((row, place) => {
    const y = top + high * (place + 0.5) + 3;
    svg.append(s("path", { d: `M${left} ${y}H${box.right}`, stroke: colors.line }));
    svg.append(text(left - 10, y + 4, clipped(row.name, left - 18), colors.ink, { "text-anchor": "end" }));
    for (const part of row.parts) {
      svg.append(s("circle", { cx: x(part.value), cy: y, r: 3, fill: colors.quiet, "fill-opacity": 0.6 }));
      hits.push({ x: x(part.value), y, lines: [row.name, part.label] });
    }
    if (row.interval)
      svg.append(s(
        "path",
        { d: `M${x(row.interval[0])} ${y}H${x(row.interval[1])}`, stroke: colors.accent, "stroke-width": 2.5 },
      ));
    svg.append(s("circle", { cx: x(row.value), cy: y, r: 5, fill: colors.accent, stroke: colors.paper }));
    hits.push({ x: x(row.value), y, lines: [row.name, row.label] });
  });
  return { svg, hits, box };
}

function clipped(words, width) {
  if (wordWidth(words) <= width) return words;
  let kept = words.length;
  while (kept > 3 && wordWidth(`${words.slice(0, kept)}…`) > width) kept--;
  return `${words.slice(0, kept)}…`;
}

// Shares of bins, as bars.
function barChart({ title, bars, xLabel, yLabel, width, colors }) {
  const height = Math.min(260, Math.max(180, width * 0.32)) + 70;
  const box = { left: 48, right: width - 14, top: 30, bottom: height - 44 };
  const svg = canvas(width, height, title, colors);
  const y = linear([0, Math.max(0.01, ...bars.map((bar) => bar.value ?? 0)) * 1.05], [box.bottom, box.top]);
  const x = linear([bars[0].low, bars[bars.length - 1].high], [box.left, box.right]);
  axes({ svg, x, y, box, xLabel, yLabel, colors });
  const hits = bars.map((bar) => {
    const value = bar.value ?? 0;
    const wide = Math.max(1, x(bar.high) - x(bar.low) - 2);
    svg.append(s(
      "rect",
      { x: x(bar.low) + 1, y: y(value), width: wide, height: box.bottom - y(value), fill: colors.accent },
    ));
    return {
      x: x((bar.low + bar.high) / 2),
      y: y(value),
      lines: [`${short(bar.low)} to ${short(bar.high)}`, short(bar.value)],
    };
  });
  return { svg, hits, box };
}

// Mean ranks with Nemenyi's critical difference (Demšar, 2006): a bar joins methods that do not differ significantly.

// Largest groups of neighbouring methods, in order of rank, whose ranks lie within the critical difference.
function cliques(ranks, critical) {
  const found = [];
  let reached = -1;
  for (let from = 0; from < ranks.length; from++) {
    let to = from;
    while (to + 1 < ranks.length && ranks[to + 1] - ranks[from] < critical) to++;
    if (to > from && to > reached) found.push([from, to]);
    reached = Math.max(reached, to);
  }
  return found;
}

function rankChart({ title, methods, critical, width, colors }) {
  const bars = cliques(methods.map((one) => one.rank), critical);
  const high = 28;
  const left = Math.min(width * 0.42, 28 + Math.max(...methods.map((one) => wordWidth(one.name))));
  const box = { left, right: width - 24 - 12 * bars.length, top: 56, bottom: 62 + methods.length * high };
  const svg = canvas(width, box.bottom + 44, title, colors);
  const x = linear([1 - 0.1, methods.length + 0.1], [box.left, box.right]);
  const xTicks = x.ticks(Math.min(
    methods.length,
    Math.floor((box.right - left) / 40),
  )).filter(({ value }) => value >= 1);
  axes({ svg, x, y: null, box, xLabel: "mean rank (1 is best)", colors, xTicks });
  const end = x(Math.min(methods.length, 1 + critical));
  svg.append(
    s("path", { d: `M${x(1)} 32v8M${x(1)} 36H${end}M${end} 32v8`, stroke: colors.muted, "stroke-width": 1.5 }),
    text(x(1), 24, `critical difference ${critical.toFixed(2)}`, colors.muted),
  );
  const middle = (place) => box.top + high * (place + 0.5) + 3;
  const hits = methods.map(({ name, rank, baseline }, place) => {
    const y = middle(place);
    svg.append(
      s("path", { d: `M${left} ${y}H${box.right}`, stroke: colors.line }),
      text(
        left - 10,
        y + 4,
        clipped(name, left - 18),
        colors.ink,
        { "text-anchor": "end", "font-weight": baseline ? 700 : 400 },
      ),
      s(
        "circle",
        {
          cx: x(rank),
          cy: y,
          r: 5.5,
          fill: baseline ? colors.paper : colors.accent,
          stroke: colors.accent,
          "stroke-width": 2,
        },
      ),
    );
    return {
      x: x(rank),
      y,
      lines: [name, `mean rank ${rank.toFixed(2)}`, baseline ? "the baseline" : null].filter(Boolean),
    };
  });
  bars.forEach(([from, to], place) => {
    const at = box.right + 14 + 12 * place;
    svg.append(s(
      "path",
      {
        d: `M${at} ${middle(from) - 8}V${middle(to) + 8}`,
        stroke: colors.ink,
        "stroke-width": 4,
        "stroke-linecap": "round",
      },
    ));
  });
  return { svg, hits, box };
}
