// Mask diagnostics of a run, where it recorded them: `mask_density/<layer>`, `dead_fraction/<layer>` and
// `agreement/<layer>/<bin>`.

const LAYER_CURVES = [
  [
    "mask_density",
    "Mask density",
    "The share of each tensor’s gradient that the mask lets through, from closed (0) to open (1).",
  ],
  ["dead_fraction", "Dead fraction", "The share of each tensor’s elements whose gradient the mask sets to zero."],
];
const AGREEMENT = /^agreement\/(.+)\/(\d)$/;
// The order of layers: "all" first, the classifier last, and numbers in names in numeric order.
const rankOf = (layer) => (layer === "all" ? 0 : layer.startsWith("classifier") ? 2 : 1);
const byPlace = (a, b) => rankOf(a) - rankOf(b) || a.localeCompare(b, "en", { numeric: true });
const isDiagnostic = (name) => /^(mask_density|dead_fraction)\/./.test(name) || AGREEMENT.test(name);

function diagnostics(label, { steps, curves }) {
  const figures = LAYER_CURVES.map(([kind, title, note]) =>
    layerFigure(kind, title, note, label, steps, curves)).filter(Boolean);
  const histogram = agreementFigure(label, steps, curves);
  if (histogram) figures.push(histogram);
  if (!figures.length) return null;
  return section(
    "Mask diagnostics",
    "What the mask did during training, tensor by tensor.",
    h("div", { class: "pair" }, figures),
  );
}

function layerFigure(kind, title, note, label, steps, curves) {
  const layers = [...curves.keys()].filter((name) => name.startsWith(`${kind}/`)).map((name) =>
    name.slice(kind.length + 1)).sort(byPlace);
  if (!layers.length) return null;
  const inner = layers.filter((layer) => layer !== "all");
  const seriesOf = (colors) => layers.map((layer) => ({
    name: layer, thick: layer === "all", color: layer === "all" ? colors.accent : ramp(
      colors.ramp,
      inner.length > 1 ? inner.indexOf(layer) / (inner.length - 1) : 0.5,
    ),
    points: steps.map((step, place) => [step, curves.get(`${kind}/${layer}`)[place]]),
  }));
  const key = layers.length <= 8;
  return figure({
    name: `${kind}-${label}`, title: `${title} over training`,
    note: say(
      note,
      !key && "Colours follow the order of the tensors, the classifier last; point at a curve to see its name.",
    ),
    draw: ({ width, colors }) => lineChart({
      title,
      series: seriesOf(colors),
      yLabel: "share",
      domain: [0, 1.02],
      width,
      colors,
      key,
    }),
    table: () => ({
      header: ["step", ...layers],
      rows: steps.map((step, place) => [step, ...layers.map((layer) => curves.get(`${kind}/${layer}`)[place])]),
    }),
  });
}

function agreementFigure(label, steps, curves) {
  const found = [...curves.keys()].map((name) => AGREEMENT.exec(name)).filter(Boolean);
  if (!found.length) return null;
  const layers = unique(found.map((match) => match[1])).sort(byPlace);
  const bins = unique(found.map((match) => Number(match[2]))).sort((a, b) => a - b);
  const share = (layer, bin, place) => curves.get(`agreement/${layer}/${bin}`)?.[place] ?? null;
  const last = steps.findLastIndex((_, place) => bins.some((bin) => share(layers[0], bin, place) !== null));
  let place = Math.max(0, last);
  const layer = () => choice("layer", layers);
  const title = "Agreement of the environments";
  const drawing = figure({
    name: `agreement-${label}`, title,
    note: "Elements by the agreement of their signs over environments: 0 means that the signs cancel out, 1 that all signs are equal.",
    draw: ({ width, colors }) => barChart({
      title, width, colors, xLabel: "agreement |mean of signs|", yLabel: "share of elements",
      bars: bins.map((bin) => ({ low: bin / 10, high: (bin + 1) / 10, value: share(layer(), bin, place) })),
    }),
    table: () => ({
      header: ["step", "layer", "bin_low", "bin_high", "share"],
      rows: layers.flatMap((one) => steps.flatMap((step, at) => bins.map((bin) => [
        step,
        one,
        bin / 10,
        (bin + 1) / 10,
        share(one, bin, at),
      ]))),
    }),
  });
  const at = h("output", null, `step ${steps[place]}`);
  const slider = h("input", {
    type: "range", min: 0, max: steps.length - 1, value: place, id: "agreement-step",
    oninput: () => {
      place = Number(slider.value);
      slider.setAttribute("aria-valuetext", `step ${steps[place]}`);
      at.textContent = `step ${steps[place]}`;
      drawing.redraw();
    },
  });
  const chooser = selectControl("Tensor", layers, layer(), (value) => {
    remember({ layer: value });
    drawing.redraw();
  });
  drawing.querySelector("figcaption").after(controls(
    chooser,
    h(
      "div",
      { class: "control" },
      h("label", { for: "agreement-step" }, "Checkpoint"),
      h("span", { class: "slider" }, slider, at),
    ),
  ));
  return drawing;
}
