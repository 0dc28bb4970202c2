// What a reader can do: choose lane, step, runs and filter; move with mouse and keys; go to the origin.

const KEYS = [["↑ ↓", "module"], ["← →", "close, open"], [", .", "step"], ["/", "filter"], ["Enter", "details"], ...(origin ? [["o", "origin"]] : [])];

// ------------------------------------------------------------------ tools

function buildTools(explorer) {
  const search = make("input", { type: "search", placeholder: "Filter by name or class", "aria-label": "Filter modules by name or class" });
  search.addEventListener("input", () => { state.text = search.value.trim().toLowerCase(); renderRows(); });
  const toggles = [toggle("not finite", "bad"), toggle("within 8× of the limit", "near"), toggle("dtype changes", "changes")];
  const last = Math.max(...data.runs.map((run) => run.columns.length)) - 1;
  const step = make("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "Step" });
  step.addEventListener("input", () => setColumn(Number(step.value)));
  const stepText = make("strong", {});
  const toOrigin = make("button", { type: "button", id: "to-origin" }, "Go to the origin");
  toOrigin.addEventListener("click", showOrigin);
  const found = make("p", { class: "count", role: "status" });
  const heads = make("div", { class: "heads", role: "row" }, make("div", { class: "heat" }));
  const rows = make("div", { class: "rows", role: "treegrid", "aria-label": "Modules and their magnitudes" }, heads);
  const hint = make("p", { class: "dim" }, "Choose a module to see its tensors, dtypes and ops.");
  const detail = make("div", { class: "detail", tabindex: "0", role: "region", "aria-live": "polite", "aria-label": "The selected module" }, hint);
  const group = (label, buttons) => make("span", { class: "group", role: "group", "aria-label": label }, buttons);
  const legend = make("div", { class: "scale" });
  explorer.append(
    patterns(),
    make("div", { class: "tools" }, group("What is measured", laneButtons()), origin ? toOrigin : null, make("label", {}, "step", step, stepText)),
    make("div", { class: "tools" }, search, group("Show only", toggles), runPickers(), found),
    legend,
    make("div", { class: "panes" }, rows, detail),
    make("p", { class: "keys" }, KEYS.map(([key, does]) => [make("kbd", {}, key), ` ${does}  `])),
  );
  return { search, toggles, step, stepText, scale: legend, count: found, heads, rows, detail };
}

function toggle(title, key) {
  const button = make("button", { type: "button", "aria-pressed": "false" }, title);
  button.addEventListener("click", () => {
    state[key] = !state[key];
    button.setAttribute("aria-pressed", String(state[key]));
    renderRows();
  });
  return button;
}

function laneButtons() {
  const buttons = lanes.map((lane) => make("button", { type: "button", "aria-pressed": String(lane.index === state.lane) }, lane.title));
  buttons.forEach((button, index) => button.addEventListener("click", () => {
    state.lane = lanes[index].index;
    buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    renderRows();
  }));
  return buttons;
}

function runPickers() {
  if (data.runs.length < 2) return [];
  return [["left", "compare"], ["right", "with"]].map(([side, word]) => {
    const options = data.runs.map((run, index) => make("option", { value: index, selected: index === state[side] }, run.label));
    if (side === "right") options.push(make("option", { value: -1 }, "(nothing)"));
    const picker = make("select", { id: `run-${side}` }, options);
    picker.addEventListener("change", () => {
      state[side] = Number(picker.value);
      renderRows();
    });
    return make("label", {}, word, picker);
  });
}

/** Hatching for what is not finite, so that it is told without color. */
function patterns() {
  const pattern = (name, d) => make(
    "pattern",
    { id: `hatch-${name}`, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
    make("rect", { class: `hatch-${name}-back`, width: 5, height: 5 }),
    make("path", { class: "hatch-line", d }),
  );
  const defined = make("defs", {}, pattern("inf", "M-1 6L6 -1"), pattern("nan", "M2.5 0V5"));
  return make("svg", { width: 0, height: 0, "aria-hidden": "true" }, defined);
}

/** What the colors mean in the shown lane. */
function scale() {
  if (showsDtypes()) return dtypeScale();
  const swatch = (kind, x, width) => make("rect", { class: `cell ${kind}`, x, width, height: 12 });
  const picture = (width, parts) => make("svg", { width, height: 12, "aria-hidden": "true" }, parts);
  const steps = Array.from({ length: 10 }, (_, i) => swatch(`l${i}`, i * 20, 20));
  const ramp = (from, to) => make("span", {}, `${from} `, picture(200, steps), ` ${to}`);
  if (laneName(state.lane) === "updates") {
    return [ramp("0%", "100%"), make("span", {}, "of the updates so far are lost to rounding; blank: not checked, or not among the parameters that lose most")];
  }
  const used = unique(data.runs.flatMap((run) => run.modules.flatMap((module) => module.s.map((series) => series[1]))));
  const ends = used.filter((name) => data.dtypes[name]).map((name) => {
    const dtype = data.dtypes[name];
    return `${dtype.short} ${number(dtype.tiny)} … ${number(dtype.max)}`;
  });
  return [
    ramp("smallest normal", "largest"),
    make("span", {}, picture(24, swatch("l9", 0, 24)), " near the max, finite"),
    make("span", {}, picture(24, swatch("inf", 0, 24)), " inf"),
    make("span", {}, picture(24, swatch("nan", 0, 24)), " NaN"),
    make("span", {}, ends.join(" · ")),
  ];
}

function dtypeScale() {
  const runs = data.runs.map((_, run) => run);
  const used = unique(runs.flatMap((run) => nodes.flatMap((node) => {
    const { into, weight, out } = rowDtypes(node, run, false);
    return [...into, ...weight, ...out];
  })));
  return [
    ...used.map((name) => make("span", { class: `dtype ${name}` }, name)),
    make("span", {}, "“differ”: the input's dtype is not that of the weight or of the output; “raises”: an operator rejects them"),
  ];
}

// ------------------------------------------------------------------ moving about

function setColumn(column) {
  state.column = Math.max(0, Math.min(column, Number(ui.step.max)));
  renderStep();
}

function focusRow(index) {
  const row = drawn[Math.max(0, Math.min(index, drawn.length - 1))];
  if (!row) return;
  for (const other of drawn) other.element.tabIndex = -1;
  row.element.tabIndex = 0;
  row.element.focus({ preventScroll: true });
  row.element.scrollIntoView({ block: "nearest" });
}

function openRow(node, open) {
  if (open) state.open.add(node.key);
  else state.open.delete(node.key);
  renderRows();
}

function openPath(node) {
  for (let up = node; up; up = up.parent) state.open.add(up.key);
}

function select(node) {
  state.selected = node;
  for (const row of drawn) row.element.setAttribute("aria-selected", String(row.node === node));
  renderDetail(node);
}

/** Shows a module wherever it is, clearing a filter that may hide it. */
function reveal(node) {
  if (node.parent) openPath(node.parent);
  Object.assign(state, { text: "", bad: false, near: false, changes: false, selected: node });
  ui.search.value = "";
  for (const button of ui.toggles) button.setAttribute("aria-pressed", "false");
  renderRows();
  focusRow(drawn.findIndex((row) => row.node === node));
}

function showOrigin() {
  if (!origin) return;
  state.column = columnOfOrigin();
  reveal(origin.node);
}

// ------------------------------------------------------------------ keys

function rowKey(event, index) {
  const { node } = drawn[index];
  const moves = {
    ArrowDown: () => focusRow(index + 1),
    ArrowUp: () => focusRow(index - 1),
    Home: () => focusRow(0),
    End: () => focusRow(drawn.length - 1),
    ArrowRight: () => (node.children.length && !isOpen(node) ? openRow(node, true) : focusRow(index + 1)),
    ArrowLeft: () => (node.children.length && isOpen(node) ? openRow(node, false) : focusParent(node)),
    Enter: () => select(node),
    " ": () => select(node),
    ".": () => setColumn(state.column + 1),
    ",": () => setColumn(state.column - 1),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
}

function focusParent(node) {
  const parent = drawn.findIndex((row) => row.node === node.parent);
  if (parent >= 0) focusRow(parent);
}

function pageKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === ui.search && event.key === "Escape") {
    ui.search.value = state.text = "";
    renderRows();
    focusRow(drawn.findIndex((row) => row.node === state.selected));
  }
  if (event.target.closest("input, select, textarea")) return;
  if (event.key === "o") showOrigin();
  if (event.key === "/") {
    event.preventDefault();
    ui.search.focus();
  }
}

// ------------------------------------------------------------------ mouse

const rowAt = (target) => drawn.findIndex((row) => row.element === target.closest(".row"));

/** What is under the mouse, in lines: a cell of a step, or the dtypes of a module. */
function tipAt(event) {
  const place = cellAt(event);
  if (place) {
    const run = data.runs[place.run];
    return [fullName(place.node), `${run.label}, step ${run.columns[place.column]}`, describe(place.cells[place.column])];
  }
  const row = event.target.closest(".row .dtypes") && drawn[rowAt(event.target)];
  const part = row && row.heats.find((one) => one.box.contains(event.target));
  return part ? [fullName(row.node), data.runs[part.run].label, describeDtypes(part.dtypes)] : null;
}

function cellAt(event) {
  const svg = event.target.closest(".row .heat svg");
  const row = drawn[rowAt(event.target)];
  if (!svg || !row) return null;
  const { run, cells } = row.heats.find((part) => part.box.contains(svg));
  const box = svg.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * cells.length);
  return { run, node: row.node, column: Math.min(cells.length - 1, Math.max(0, column)), cells };
}

function rowClick(event) {
  const index = rowAt(event.target);
  if (index < 0) return;
  const { node } = drawn[index];
  const place = cellAt(event);
  if (place) setColumn(place.column);
  select(node);
  if (event.target.closest(".twist") && node.children.length) openRow(node, !isOpen(node));
  else focusRow(index);
}

function rowDoubleClick(event) {
  const row = drawn[rowAt(event.target)];
  if (row && row.node.children.length && !event.target.closest(".twist, .heat")) openRow(row.node, !isOpen(row.node));
}

function buildTip() {
  const tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  document.body.append(tip);
  ui.rows.addEventListener("mouseleave", () => { tip.hidden = true; });
  ui.rows.addEventListener("mousemove", (event) => {
    const lines = tipAt(event);
    tip.hidden = !lines;
    if (!lines) return;
    tip.textContent = lines.join("\n");
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
}

// ------------------------------------------------------------------ the beginning

/** A small model is open all over; of a large one the first levels and the way to the origin are. */
function openAtFirst() {
  const few = nodes.length <= 80;
  for (const node of nodes) {
    if (few) openPath(node);
    else if (node.parent && node.fqn.split(".").length <= 2) openPath(node.parent);
  }
  roots.forEach(openPath);
  if (!origin) return;
  openPath(origin.node);
  state.selected = origin.node;
  state.column = columnOfOrigin();
}

function redrawWhenResized() {
  let width = ui.rows.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(ui.rows.clientWidth - width) < 2) return;
    width = ui.rows.clientWidth;
    requestAnimationFrame(renderRows);
  }).observe(ui.rows);
}

function start(explorer) {
  ui = buildTools(explorer);
  openAtFirst();
  renderRows();
  const chosen = drawn.find((row) => row.node === state.selected);
  if (chosen) ui.rows.scrollTop = chosen.element.offsetTop - ui.rows.clientHeight / 2;
  ui.rows.addEventListener("keydown", (event) => {
    const index = rowAt(event.target);
    if (index >= 0 && !event.ctrlKey && !event.metaKey && !event.altKey) rowKey(event, index);
  });
  ui.rows.addEventListener("click", rowClick);
  ui.rows.addEventListener("dblclick", rowDoubleClick);
  document.addEventListener("keydown", pageKey);
  for (const button of document.querySelectorAll(".goto")) {
    button.addEventListener("click", () => {
      const node = blamed.find((one, index) => data.findings[index].fqn === button.dataset.fqn) || find(button.dataset.fqn);
      if (!node) return;
      if (origin && node === origin.node) showOrigin();
      else reveal(node);
      document.getElementById("map").scrollIntoView();
    });
  }
  buildTip();
  redrawWhenResized();
}

// ------------------------------------------------------------------ links to a part of the page

/** Shows what the address names, whatever hides it: a module's row, or an element that is folded away. */
function showLinked() {
  const id = decoded(location.hash.slice(1));
  const node = ui && nodes.find((one) => rowId(one) === id);
  if (node) reveal(node);
  const element = id ? document.getElementById(id) : null;
  for (let up = element; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  if (element) element.scrollIntoView({ block: node ? "center" : "start" });
}

function decoded(hash) {
  try {
    return decodeURIComponent(hash);
  } catch {
    return hash; // a percent sign that is no escape
  }
}

if (document.getElementById("explorer") && data.runs.length) start(document.getElementById("explorer"));
addEventListener("hashchange", showLinked);
showLinked();
