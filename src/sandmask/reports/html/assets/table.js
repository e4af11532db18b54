// A table that can be sorted, fits its box, and can be downloaded as LaTeX, Markdown and CSV.

// `columns`: {title, numeric, hint}; `rows`: arrays of {text, value, node}. `files` may replace the
// downloads: grid(rows) for LaTeX and Markdown, table(rows) for CSV. `limit` rows are drawn at first.
function dataTable({ name, title, columns, rows, notes = [], files = {}, limit = Infinity, sortable = true }) {
  const key = `sort.${name}`;
  let shown = limit;
  const body = h("tbody");
  const heads = columns.map((column, place) =>
    h("th", { scope: "col", class: column.numeric ? "numeric" : null },
      sortable
        ? h(
          "button",
          { type: "button", title: column.hint, onclick: () => sortBy(place) },
          column.title,
          h("span", { class: "arrow", "aria-hidden": "true" }),
        )
        : column.title));
  const more = h("button", { type: "button", class: "more", onclick: () => { shown += 500; draw(); } });

  function sorting() {
    const [place, direction] = param(key).split(":");
    return param(key) && columns[Number(place)] ? { place: Number(place), down: direction === "down" } : null;
  }

  function sortBy(place) {
    const now = sorting();
    const first = columns[place].numeric ? "down" : "up";
    const other = first === "down" ? "up" : "down";
    const same = now?.place === place;
    const direction = same ? ((now.down ? "down" : "up") === first ? other : null) : first;
    remember({ [key]: direction && `${place}:${direction}` }); // the third click restores the original order
    draw();
  }

  function ordered() {
    const now = sorting();
    if (!now) return rows;
    const value = (row) => row[now.place].value ?? (columns[now.place].numeric ? null : row[now.place].text);
    const sign = now.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [first, second] = [value(a), value(b)];
      if (first === null || second === null) return (first === null) - (second === null); // missing values come last
      if (typeof first === "number" && typeof second === "number") return sign * (first - second);
      return sign * String(first).localeCompare(String(second), "en", { numeric: true });
    });
  }

  function draw() {
    const now = sorting();
    heads.forEach((head, place) => {
      const direction = now?.place === place ? (now.down ? "descending" : "ascending") : null;
      if (direction) head.setAttribute("aria-sort", direction);
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...ordered().slice(0, shown).map((row) =>
      h("tr", null, row.map((cell, place) =>
        h(place ? "td" : "th", { scope: place ? null : "row", class: columns[place].numeric ? "numeric" : null },
          cell.node ?? cell.text)))));
    more.hidden = rows.length <= shown;
    more.textContent = `Show more (${(rows.length - shown).toLocaleString("en")} left)`;
    rove(body);
  }

  const grid = () => files.grid?.(ordered()) ?? {
    title,
    header: columns.map((column) => column.title),
    rows: ordered().map((row) => row.map((cell) => cell.text)),
    notes,
  };
  const numbers = () => files.table?.(ordered()) ?? { header: grid().header, rows: grid().rows };
  draw();
  return h("div", { class: "table" },
    h("h3", null, title),
    h("p", { class: "goes-on-words" }, "Scroll sideways for more columns →"),
    framed(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
      h("table", null, h("caption", { class: "unseen" }, title), h("thead", null, h("tr", null, heads)), body))),
    more,
    noteList(notes),
    h("div", { class: "downloads" },
      downloadButton("LaTeX", title, () => save(`${name}.tex`, "application/x-tex", latex(grid()))),
      downloadButton("Markdown", title, () => save(`${name}.md`, "text/markdown", markdown(grid()))),
      downloadButton("CSV", title, () => save(`${name}.csv`, "text/csv", csv(numbers().header, numbers().rows)))));
}

// A frame around a scrolling box, which shows whether there are more columns to the right.
function framed(box) {
  const frame = h("div", { class: "frame" }, box);
  const look = () => {
    frame.classList.toggle("goes-on", box.scrollWidth > box.clientWidth + 1);
    frame.classList.toggle("at-end", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
  };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
  new ResizeObserver(look).observe(box.firstChild);
  return frame;
}

function noteList(notes) {
  const list = (some) => h("ul", { class: "notes" }, some.map((note) => h("li", null, note)));
  if (notes.length <= 4) return notes.length ? list(notes) : null;
  return h("details", { class: "more-notes" }, h("summary", null, `${notes.length} notes`), list(notes));
}

// The buttons inside cells are a single tab stop; arrow keys move from cell to cell.
function rove(body) {
  const buttons = () => [...body.querySelectorAll("td button")];
  buttons().forEach((button, place) => (button.tabIndex = place ? -1 : 0));
  body.onkeydown = (event) => {
    const cell = event.target.closest("td");
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!cell || !move) return;
    const row = body.rows[cell.parentNode.sectionRowIndex + move[0]];
    const next = row?.cells[cell.cellIndex + move[1]]?.querySelector("button");
    event.preventDefault();
    if (!next) return;
    buttons().forEach((button) => (button.tabIndex = button === next ? 0 : -1));
    next.focus();
  };
}

// Tables as LaTeX, Markdown and CSV: the same text as `sandmask report --format` gives (a test compares them).

const LATEX_LETTERS = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", $: "\\$", "#": "\\#", _: "\\_", "{": "\\{", "}": "\\}",
  "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$", "±": "$\\pm$", "†": "$^\\dagger$",
};

function latexWords(words) {
  const escaped = [...words].map((letter) => LATEX_LETTERS[letter] ?? letter).join("");
  return escaped.replace(/(?<![\p{L}\p{N}_])-(?=\p{Nd})/gu, "$$-$$");
}

function latex(grid) {
  const notes = grid.notes.map((note) => `\\par\\footnotesize ${latexWords(note)}`);
  const lines = [
    "\\begin{table}",
    "\\centering",
    `\\caption{${latexWords(grid.title)}}`,
    "\\adjustbox{max width=\\textwidth}{%",
    `\\begin{tabular}{l${"c".repeat(grid.header.length - 1)}}`,
    "\\toprule",
    `${grid.header.map((word) => `\\textbf{${latexWords(word)}}`).join(" & ")} \\\\`,
    "\\midrule",
    // A row that begins with [ or * would otherwise be an argument of the previous one.
    ...grid.rows.map((row) => `${row.map(latexWords).join(" & ").replace(/^(?=[[*])/, "{}")} \\\\`),
    "\\bottomrule",
    "\\end{tabular}}",
    ...notes,
    "\\end{table}",
  ];
  return `% \\usepackage{booktabs, adjustbox}\n\n${lines.join("\n")}\n`;
}

const plainMarkdown = (words) =>
  words
    .replace(/[\\*`~]|(?<![\p{L}\p{N}])_|_(?![\p{L}\p{N}])/gu, "\\$&")
    .replace(/<(?=[A-Za-z/!?])/g, "&lt;")
    .replaceAll("](", "]\\(");

function markdown(grid) {
  const rule = ["---", ...Array(grid.header.length - 1).fill("---:")];
  const lines = [grid.header, rule, ...grid.rows].map(
    (row) => `| ${row.map((word) => plainMarkdown(word).replaceAll("|", "\\|")).join(" | ")} |`,
  );
  const notes = grid.notes.map((note) => `- ${plainMarkdown(note)}`);
  return `${[`### ${plainMarkdown(grid.title)}`, "", ...lines, "", ...notes].join("\n").trimEnd()}\n`;
}

// Put an apostrophe before a word that could be taken for a formula.
const csvWord = (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value)
  && !/^([+-]?\d+(\.\d+)?|-)$/.test(value) ? `'${value}` : String(value));

function csv(header, rows) {
  const quoted = (value) => {
    const words = value === null || value === undefined ? "" : csvWord(value);
    return /[",\r\n]/.test(words) ? `"${words.replaceAll('"', '""')}"` : words;
  };
  return [header, ...rows].map((row) => `${row.map(quoted).join(",")}\r\n`).join("");
}
