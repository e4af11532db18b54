// Mean ranks with Nemenyi's critical difference (Demšar, 2006): a bar joins methods that are not told apart.

// Largest runs of methods, in order of rank, whose ranks all lie within the critical difference.
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
