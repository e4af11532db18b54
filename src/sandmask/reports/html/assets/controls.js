// Labelled controls. Each tells its new value; what is drawn from it is up to the view.

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
