// Create elements. Text is always inserted as text, because names in records may contain anything.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const s = (tag, properties, ...children) =>
  fill(document.createElementNS(SVG_NAMESPACE, tag), properties, children);

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const listed = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
const unique = (values) => [...new Set(values)];
const minus = (text) => text.replace("-", "−");
const percent = (value, digits = 1) => (value === null || value === undefined ? "-" : value.toFixed(digits));
const signed = (value, digits = 1) => minus((value < 0 ? "" : "+") + value.toFixed(digits));

// A section with a heading and a sentence that explains its content.
function section(title, explanation, ...content) {
  return h("section", null, h("h2", null, title), explanation && h("p", { class: "lead" }, explanation), content);
}

// Sentences in a row; those that do not apply are left out.
const say = (...sentences) => sentences.filter(Boolean).join(" ");

const empty = (...words) => h("p", { class: "empty" }, words);

function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const anchor = h("a", { href: address, download: name.replace(/[^\w.+-]+/g, "-") });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Labelled controls. Each passes its new value to a function of the view.

let controlCount = 0;

function selectControl(label, options, value, onchange) {
  const id = `control-${controlCount++}`;
  const entries = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const select = h("select", { id, onchange: () => onchange(select.value) },
    entries.map(([key, words]) => h("option", { value: key, selected: key === value }, words)));
  return h("div", { class: "control" }, h("label", { for: id }, label), select);
}

function switchControl(label, on, onchange) {
  const input = h("input", { type: "checkbox", role: "switch", checked: on, onchange: () => onchange(input.checked) });
  return h(
    "label",
    { class: "switch" },
    input,
    h("span", { class: "knob", "aria-hidden": "true" }),
    h("span", null, label),
  );
}

function searchControl(label, value, placeholder, oninput) {
  const id = `control-${controlCount++}`;
  const input = h(
    "input",
    {
      id,
      type: "search",
      value,
      placeholder,
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => oninput(input.value),
    },
  );
  return h("div", { class: "control" }, h("label", { for: id }, label), input);
}

const controls = (...some) => h("div", { class: "controls" }, some);

// Every word has to occur; a comma separates alternatives: "mask, erm".
function matches(query, words) {
  const alternatives = query.toLowerCase().split(",").map((part) => part.trim()).filter(Boolean);
  const text = words.toLowerCase();
  return !alternatives.length || alternatives.some((part) => part.split(/\s+/).every((word) => text.includes(word)));
}
