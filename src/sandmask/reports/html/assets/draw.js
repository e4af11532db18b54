// The parts of a drawing: colours, axes, legend. Colours are written out, so that a downloaded SVG stands alone.

const PALETTES = {
  light: {
    paper: "#ffffff", ink: "#1d1f22", muted: "#5a6068", line: "#dcd8cf", accent: "#a3480f", quiet: "#6c8bab",
    series: ["#3b6ea5", "#1b7f5c", "#8a4a94", "#8a6d00", "#b23a5e", "#4d5b6a"], ramp: ["#74933f", "#2d8577", "#2b3a67"],
  },
  dark: {
    paper: "#1e2125", ink: "#ebe8e2", muted: "#a9aeb6", line: "#3a3f46", accent: "#f2a65e", quiet: "#7d9dbd",
    series: ["#7fb0e0", "#5fc49e", "#c998d6", "#d9bc57", "#ee8ba9", "#a9b6c4"], ramp: ["#7c93d6", "#4fb3a3", "#dbe6b4"],
  },
};
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";
const palette = () => PALETTES[theme()];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];

function text(x, y, words, color, more = {}) {
  return s("text", { x, y, fill: color, "font-size": 12, ...more }, words);
}

const ruler = document.createElement("canvas").getContext("2d");

function wordWidth(words) {
  ruler.font = `12px ${FONT}`;
  return ruler.measureText(words).width;
}

// Colours from a ramp of three, for things that are ordered.
function ramp(stops, share) {
  const place = Math.min(1.9999, Math.max(0, share * 2));
  const channel = (hex, at) => parseInt(hex.slice(1 + 2 * at, 3 + 2 * at), 16);
  const [from, to] = [stops[Math.floor(place)], stops[Math.floor(place) + 1]];
  const mixed = [0, 1, 2].map((at) =>
    Math.round(channel(from, at) + (channel(to, at) - channel(from, at)) * (place % 1)));
  return `rgb(${mixed.join(",")})`;
}

function canvas(width, height, title, colors) {
  const properties = {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title, "font-family": FONT,
    style: "font-variant-numeric: tabular-nums",
  };
  return s("svg", properties, s("rect", { width, height, fill: colors.paper }));
}

// Legend entries ({name, color, dash, dot}) set in rows at the top; answers with the group and its height.
function legend(entries, width, left, colors) {
  const group = s("g");
  let x = left;
  let y = 22;
  for (const { name, color, dash, thick, dot } of entries) {
    const wide = 30 + wordWidth(name);
    if (x > left && x + wide > width - 8) [x, y] = [left, y + 19];
    group.append(
      dot
        ? s("circle", { cx: x + 9, cy: y - 4, r: 4, fill: color })
        : s(
          "path",
          { d: `M${x} ${y - 4}h18`, stroke: color, "stroke-width": thick ? 2.5 : 1.5, "stroke-dasharray": dash },
        ),
      text(x + 23, y, name, colors.ink),
    );
    x += wide + 12;
  }
  return { group, height: entries.length ? y + 12 : 10 };
}

function axes({ svg, x, y, box, xLabel, yLabel, colors, xTicks, yTicks }) {
  const { left, right, top, bottom } = box;
  const group = s("g");
  for (const { value, label } of yTicks ?? (yLabel === undefined ? [] : y.ticks(5))) {
    const at = y(value);
    group.append(
      s("path", { d: `M${left} ${at}H${right}`, stroke: colors.line }),
      text(left - 7, at + 4, label, colors.muted, { "text-anchor": "end" }),
    );
  }
  group.append(s("path", { d: `M${left} ${bottom}H${right}`, stroke: colors.muted }));
  for (const { value, label } of xTicks ?? x.ticks(Math.max(3, Math.floor((right - left) / 80)))) {
    const at = x(value);
    group.append(
      s("path", { d: `M${at} ${bottom}v4`, stroke: colors.muted }),
      text(at, bottom + 18, label, colors.muted, { "text-anchor": "middle" }),
    );
  }
  if (xLabel) group.append(text((left + right) / 2, bottom + 37, xLabel, colors.ink, { "text-anchor": "middle" }));
  if (yLabel) group.append(text(8, top - 9, yLabel, colors.ink));
  svg.append(group);
}

// A path through points, broken where a value is missing.
function pathOf(points) {
  let path = "";
  let down = false;
  for (const [x, y] of points) {
    if (y === null || !Number.isFinite(y)) down = false;
    else {
      path += `${down ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      if (!down) path += "h0"; // a lone point is drawn too, as a dot
      down = true;
    }
  }
  return path;
}
