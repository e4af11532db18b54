// From values to places in a drawing.

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => `10${[...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("")}`;

// A number for an axis or a tooltip: short, and true to about four digits.
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

// The extent of values with some air, widened to hold `include`.
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
