// A figure: a drawing that fits its place, can be read with a pointer or the arrow keys, and can be downloaded.

const redraws = new Set(); // of the figures on the page, for a change of theme

// `draw({width, colors})` returns a chart; `table()` returns {header, rows} for the CSV file.
function figure({ name, title, note, draw, table }) {
  const place = h("div", { class: "drawing" });
  const tip = h("div", { class: "tip", role: "status" });
  const frame = h(
    "div",
    { class: "plot", tabindex: 0, role: "group", "aria-label": `${title}. Arrow keys read its values.` },
    place,
    tip,
  );
  const node = h("figure", null, h("figcaption", null, h("h3", null, title), note && h("p", null, note)), frame,
    h("div", { class: "downloads" },
      downloadButton("SVG", title, () => save(`${name}.svg`, "image/svg+xml", drawingFile(draw))),
      downloadButton("CSV", title, () => save(`${name}.csv`, "text/csv", csv(table().header, table().rows)))));
  const reader = makeReader(frame, tip);
  let width = 0;
  const redraw = () => {
    if (!width) return;
    const drawn = draw({ width, colors: palette() });
    place.replaceChildren(drawn.svg);
    reader.use(drawn);
  };
  new ResizeObserver(([entry]) => {
    const next = Math.floor(entry.contentRect.width);
    if (!next || Math.abs(next - width) < 2) return;
    width = next;
    redraw();
  }).observe(frame);
  redraws.add(redraw);
  node.redraw = redraw;
  return node;
}

const downloadButton = (kind, title, onclick) =>
  h("button", { type: "button", class: "download", "aria-label": `Download ${kind}: ${title}`, onclick }, kind);

// The drawing as a file, in the light colours.
function drawingFile(draw) {
  const { svg } = draw({ width: 760, colors: PALETTES.light });
  svg.setAttribute("xmlns", SVG_NAMESPACE);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${svg.outerHTML}\n`;
}

// Reading values: the nearest hit to the pointer, or the next one by arrow key; Enter or a click opens it.
function makeReader(frame, tip) {
  let drawn = null;
  let at = -1;
  let cursor = null;

  function show(next) {
    at = next;
    cursor?.remove();
    const hit = drawn?.hits[at];
    tip.hidden = !hit;
    if (!hit) return;
    const color = palette().ink;
    cursor = hit.y === null
      ? s("path", { d: `M${hit.x} ${hit.top}V${hit.bottom}`, stroke: color, "stroke-opacity": 0.5 })
      : s("circle", { cx: hit.x, cy: hit.y, r: 7.5, fill: "none", stroke: color, "stroke-width": 1.5 });
    drawn.svg.append(cursor);
    tip.replaceChildren(...hit.lines.map((line) => h("div", null, line)));
    const wide = frame.clientWidth;
    const left = hit.x + tip.offsetWidth + 18 < wide ? hit.x + 14 : Math.max(0, hit.x - tip.offsetWidth - 14);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(0, (hit.y ?? hit.top + 12) - 12)}px`;
  }

  function nearest(event) {
    const box = frame.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1;
    let least = 40 ** 2;
    drawn?.hits.forEach((hit, place) => {
      const distance = (hit.x - x) ** 2 + (hit.y === null ? 0 : (hit.y - y) ** 2);
      if (distance < least) [best, least] = [place, distance];
    });
    return best;
  }

  const order = () => drawn.hits.map((_, place) => place).sort((a, b) => drawn.hits[a].x - drawn.hits[b].x);
  frame.addEventListener("pointermove", (event) => show(nearest(event)));
  frame.addEventListener("pointerleave", () => show(-1));
  frame.addEventListener("blur", () => show(-1));
  frame.addEventListener("click", () => drawn?.hits[at]?.open?.());
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter") drawn?.hits[at]?.open?.();
    if (event.key === "Escape") show(-1);
    if (!move || !drawn?.hits.length) return;
    event.preventDefault();
    const places = order();
    const now = places.indexOf(at);
    show(places[now < 0 ? (move > 0 ? 0 : places.length - 1) : Math.min(places.length - 1, Math.max(0, now + move))]);
  });
  tip.hidden = true;
  return {
    use(next) {
      drawn = next;
      cursor = null;
      tip.hidden = true;
      at = -1;
    },
  };
}
