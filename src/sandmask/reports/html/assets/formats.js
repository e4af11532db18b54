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
    ...grid.rows.map((row) => `${row.map(latexWords).join(" & ")} \\\\`),
    "\\bottomrule",
    "\\end{tabular}}",
    ...notes,
    "\\end{table}",
  ];
  return `% \\usepackage{booktabs, adjustbox}\n\n${lines.join("\n")}\n`;
}

const plainMarkdown = (words) => words.replace(/<(?=[A-Za-z/!?])/g, "&lt;").replaceAll("](", "]\\(");

function markdown(grid) {
  const rule = ["---", ...Array(grid.header.length - 1).fill("---:")];
  const lines = [grid.header, rule, ...grid.rows].map(
    (row) => `| ${row.map((word) => plainMarkdown(word).replaceAll("|", "\\|")).join(" | ")} |`,
  );
  const notes = grid.notes.map((note) => `- ${plainMarkdown(note)}`);
  return `${[`### ${plainMarkdown(grid.title)}`, "", ...lines, "", ...notes].join("\n").trimEnd()}\n`;
}

// A word that could be taken for a formula gets an apostrophe before it.
const csvWord = (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value)
  && !/^([+-]?\d+(\.\d+)?|-)$/.test(value) ? `'${value}` : String(value));

function csv(header, rows) {
  const quoted = (value) => {
    const words = value === null || value === undefined ? "" : csvWord(value);
    return /[",\r\n]/.test(words) ? `"${words.replaceAll('"', '""')}"` : words;
  };
  return [header, ...rows].map((row) => `${row.map(quoted).join(",")}\r\n`).join("");
}
