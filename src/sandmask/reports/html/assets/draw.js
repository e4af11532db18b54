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

// Legend entries ({name, color, dash, dot}) set in rows at the top. Returns the group and its height.
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

// From values to places in a drawing.

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => `10${[...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("")}`;

// A number for an axis or a tooltip, with about four digits.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const exponent = Math.floor(Math.log10(size));
    const lead = Number((value / 10 ** exponent).toPrecision(3));
    return minus(lead === 1 ? power(exponent) : `${lead}·${power(exponent)}`);
  }
  return minus(String(Number(value.toPrecision(4))));
}

function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const size = 10 ** Math.floor(Math.log10(rough));
  return size * [1, 2, 5, 10].find((factor) => factor * size >= rough * 0.999);
}

function linear([low, high], [from, to]) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  scale.ticks = (count) => {
    const step = niceStep(span, count);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    return ticks.map((value) => ({ value, label: short(Number(value.toPrecision(12))) }));
  };
  return scale;
}

function logarithmic([low, high], [from, to]) {
  const inner = linear([Math.log10(low), Math.log10(high)], [from, to]);
  const scale = (value) => inner(Math.log10(value));
  scale.ticks = (count) => {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    if (last - first < 1) {
      const few = linear([low, high], [from, to]).ticks(Math.min(3, count));
      return few.filter(({ value }) => value > 0);
    }
    const every = Math.max(1, Math.ceil((last - first + 1) / count));
    const within = last - first <= 1 && count > 4 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let k = first - 1; k <= last; k += every)
      for (const factor of within) ticks.push({
        value: factor * 10 ** k,
        label: short(Number((factor * 10 ** k).toPrecision(2))),
      });
    return ticks.filter(({ value }) => value >= low && value <= high);
  };
  return scale;
}

// The range of `values` and `include`, with a margin of the share `air`.
function extent(values, include = [], air = 0.05) {
  const all = [...values, ...include].filter((value) => Number.isFinite(value));
  if (!all.length) return [0, 1];
  let low = Infinity;
  let high = -Infinity;
  for (const value of all) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const margin = (high - low || Math.abs(high) || 1) * air;
  return [low - margin, high + margin];
}

const isWide = (values) => values.length > 0 && Math.min(...values) > 0
  && Math.max(...values) > 30 * Math.min(...values);
