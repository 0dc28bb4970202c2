// The table of modules: which rows are shown, and how each is drawn.

const ROW_HEIGHT = 17;
const WIDEST_COLUMN = 28;

/** The first finding that blames a module of the tree. */
const origin = data.findings.map((finding, index) => ({ finding, node: blamed[index] })).find((place) => place.node) || null;

const state = {
  left: 0,
  right: data.runs.length > 1 ? 1 : -1, // -1: nothing beside it
  lane: firstLane(),
  column: 0,
  text: "",
  bad: false,
  near: false,
  changes: false,
  open: new Set(),
  selected: null,
};

/** Elements of the explorer, once it is built, and the rows that are drawn. */
let ui = null;
let drawn = [];

function firstLane() {
  const wanted = lanes.find((lane) => origin && lane.name === origin.finding.lane) || lanes[0];
  return wanted ? wanted.index : 0;
}

function columnOf(step) {
  const found = data.runs[state.left].columns.findIndex((label) => {
    const [first, last] = label.split("–").map(Number);
    return step >= first && step <= (last || first);
  });
  return Math.max(found, 0);
}

/** The step to begin with: that of the finding, of lost updates the last that was checked. */
function columnOfOrigin() {
  const checked = laneName(state.lane) === "updates" ? ownCells(origin.node, state.left, state.lane).findLastIndex(Boolean) : -1;
  if (checked >= 0) return checked;
  return origin.finding.step === null ? state.column : columnOf(origin.finding.step);
}

const showsDtypes = () => laneName(state.lane) === "dtypes";
const shownRuns = () => [state.left, state.right].filter((run) => run >= 0);
const isOpen = (node) => state.open.has(node.key);

function shownCells(node, run) {
  return (isOpen(node) || !node.children.length ? ownCells : subtreeCells)(node, run, state.lane);
}

// ------------------------------------------------------------------ filter

const isFiltering = () => Boolean(state.text || state.bad || state.near || state.changes);

function isNear(cell) {
  return Boolean(cell) && (isBad(cell) || (!cell.share && level(cell) !== null && data.dtypes[cell.d].max / cell.a < 8));
}

function matches(node) {
  const anywhere = (test) => shownRuns().some((run) => ownCells(node, run, state.lane).some(test));
  if (state.text && !`${node.fqn} ${node.cls}`.toLowerCase().includes(state.text)) return false;
  if (state.bad && !anywhere(isBad)) return false;
  if (state.near && !anywhere(isNear)) return false;
  return !state.changes || flowsOf(node, state.left).some((flow) => flow[6] || flow[7]);
}

/** The rows to show, depth first; with a filter also the containers of what it finds. */
function visibleRows() {
  const filtering = isFiltering();
  const rows = [];
  let found = 0;
  const walk = (node, depth) => {
    const at = rows.length;
    const hit = !filtering || (node.runs.some(Boolean) && matches(node));
    rows.push({ node, depth, context: !hit });
    if (hit && node.runs.some(Boolean)) found += 1;
    if (filtering || isOpen(node)) node.children.forEach((child) => walk(child, depth + 1));
    if (!hit && rows.length === at + 1) rows.pop();
  };
  roots.forEach((root) => walk(root, 0));
  return { rows, found: filtering ? found : nodes.length };
}

// ------------------------------------------------------------------ cells of a row

/** Runs side by side share one scale of steps, so that one ending early is seen to. */
function columnWidth() {
  const room = ui.heads.querySelector(".heat").clientWidth;
  return Math.min(WIDEST_COLUMN, room / Math.max(...shownRuns().map((run) => data.runs[run].columns.length)));
}

function heat(cells, width) {
  const paths = new Map();
  const gap = width >= 6 ? 1 : 0;
  for (let i = 0; i < cells.length; ) {
    const kind = cells[i] ? shade(cells[i]) : null;
    let end = i + 1;
    while (!gap && end < cells.length && cells[end] && shade(cells[end]) === kind) end += 1;
    if (kind) {
      const length = ((end - i) * width - gap).toFixed(2);
      paths.set(kind, `${paths.get(kind) || ""}M${(i * width).toFixed(2)} 1h${length}v15h-${length}z`);
    }
    i = end;
  }
  const total = (cells.length * width).toFixed(2);
  return make(
    "svg",
    { viewBox: `0 0 ${total} ${ROW_HEIGHT}`, width: total, height: ROW_HEIGHT, preserveAspectRatio: "none", "aria-hidden": "true" },
    [...paths].map(([kind, d]) => make("path", { d, class: `cell ${kind}` })),
  );
}

/** Input, weight and output dtype of a module, as texts on the color of each dtype. */
function dtypeCells(dtypes) {
  const part = (names) => make("span", { class: `dtype ${names.length > 1 ? "several" : names[0] || ""}` }, names.join(" "));
  return make("div", { class: dtypes.raised.length ? "dtypes raises" : "dtypes" }, part(dtypes.into), part(dtypes.weight), part(dtypes.out));
}

/** What a row shows of one run. */
function makeHeat(node, run, width) {
  if (showsDtypes()) {
    const dtypes = rowDtypes(node, run, !isOpen(node));
    return { run, dtypes, box: make("div", { class: "heat", role: "gridcell" }, dtypeCells(dtypes)) };
  }
  const cells = shownCells(node, run);
  return { run, cells, box: make("div", { class: "heat", role: "gridcell" }, heat(cells, width)) };
}

/** Floating-point dtypes in and out of a module in the shown lane, and what changes them. */
function dtypesOf(node) {
  const phases = data.lanes[state.lane][0] === "generate" ? ["generate"] : ["forward", "recompute"];
  const flows = flowsOf(node, state.left).filter((flow) => phases.includes(flow[0]));
  const floating = (names) => unique(names.filter((name) => data.dtypes[name]).map(short)).join(" ");
  const texts = flows.map((flow) => {
    const [into, out] = [floating(flow[2]), floating(flow[4])];
    return into && into !== out ? `${into}→${out || "–"}` : out;
  });
  return { text: unique(texts.filter(Boolean)).join(", "), why: unique(flows.map((flow) => flow[6]).filter(Boolean)).join("; ") };
}

function tags(node) {
  const found = blamed.flatMap((place, index) => (place === node
    ? [make("span", { class: "tag origin", title: data.findings[index].summary }, index ? `FINDING ${index + 1}` : "ORIGIN")]
    : []));
  const cells = shownCells(node, state.left);
  const first = cells.findIndex(isBad);
  if (first >= 0) {
    found.push(make("span", { class: "tag" }, `${badWord(cells[first])} @ ${data.runs[state.left].columns[first]}`));
  }
  return found;
}

/** The name under which the page can be opened at a module, whether its row is drawn or not. */
const rowId = (node) => `module-${node.key}`;

function makeRow({ node, depth, context }, width) {
  const parent = node.children.length > 0;
  const dtypes = dtypesOf(node);
  const name = make(
    "div",
    { class: "name", role: "gridcell" },
    make("span", { class: "twist", "aria-hidden": "true" }, parent ? (isOpen(node) ? "▾" : "▸") : ""),
    make("b", { title: fullName(node) }, node.label),
    tags(node),
    make("span", { class: "dim" }, node.parent ? node.cls : ""),
  );
  name.style.setProperty("--depth", depth);
  const types = make("div", { class: dtypes.why ? "types changes" : "types", role: "gridcell", title: dtypes.why || null }, dtypes.text);
  const value = make("div", { class: "value", role: "gridcell" });
  const heats = shownRuns().map((run) => makeHeat(node, run, width));
  const attributes = {
    id: rowId(node),
    class: context ? "row context" : "row",
    role: "row",
    tabindex: "-1",
    "aria-level": depth + 1,
    "aria-expanded": parent ? String(isOpen(node)) : null,
    "aria-selected": String(state.selected === node),
    "data-key": node.key,
  };
  return { node, value, heats, element: make("div", attributes, name, types, value, heats.map((part) => part.box)) };
}

// ------------------------------------------------------------------ drawing

function renderRows() {
  const focused = document.activeElement.closest(".row");
  const key = focused ? focused.dataset.key : null;
  const { rows, found } = visibleRows();
  ui.rows.style.setProperty("--runs", shownRuns().length);
  ui.rows.classList.toggle("alone", shownRuns().length === 1);
  renderHeads();
  const width = columnWidth();
  drawn = rows.map((row) => makeRow(row, width));
  const none = make("p", { class: "empty" }, "No module matches. Clear the filter to see all of them.");
  ui.rows.replaceChildren(ui.heads, ...(drawn.length ? drawn.map((row) => row.element) : [none]));
  const entry = drawn.find((row) => row.node.key === key) || drawn.find((row) => row.node === state.selected) || drawn[0];
  if (entry) {
    entry.element.tabIndex = 0;
    if (entry.node.key === key) entry.element.focus({ preventScroll: true });
  }
  ui.count.textContent = `${found} of ${nodes.length} modules`;
  ui.scale.replaceChildren(...scale());
  ui.step.disabled = showsDtypes();
  renderStep();
}

function renderHeads() {
  const head = (className, ...content) => make("div", { class: className, role: "columnheader" }, content);
  const heats = shownRuns().map((run) => head("heat", make("strong", {}, data.runs[run].label)));
  ui.heads.replaceChildren(head("only-wide", "module"), head("only-wide", "dtype in→out"), head("only-wide value", valueTitle()), ...heats);
  const width = columnWidth();
  const parts = () => make("div", { class: "dtypes" }, ["input", "weight", "output"].map((part) => make("span", {}, part)));
  shownRuns().forEach((run, index) => heats[index].append(showsDtypes() ? parts() : axis(data.runs[run].columns, width)));
}

const valueTitle = () => ({ dtypes: "note", updates: "lost" })[laneName(state.lane)] ?? "absmax";

function axis(columns, width) {
  const every = Math.max(1, Math.ceil(34 / width));
  const fits = (label, i) => i % every === 0 && i * width + 6 * label.length <= Math.max(columns.length * width, 12);
  const shown = columns.map((label) => label.split("–")[0]);
  const labels = shown.map((label, i) => (fits(label, i) ? make("text", { x: (i * width).toFixed(1), y: 10 }, label) : null));
  return make("svg", { width: (columns.length * width).toFixed(2), height: 13, "aria-hidden": "true" }, labels);
}

/** Shows the numbers of the chosen step and frames its column. */
function renderStep() {
  const width = columnWidth();
  ui.step.value = state.column;
  ui.stepText.textContent = data.runs[state.left].columns[state.column] ?? "–";
  for (const { node, value, heats } of drawn) {
    if (showsDtypes()) {
      const [{ dtypes }] = heats;
      value.textContent = dtypesWord(dtypes);
      value.classList.toggle("bad-value", dtypes.raised.length > 0);
      value.title = describeDtypes(dtypes);
      continue;
    }
    const cell = shownCells(node, state.left)[state.column];
    value.textContent = cell ? magnitude(cell) : "";
    value.classList.toggle("bad-value", isBad(cell));
    value.title = describe(cell);
    for (const { cells, box } of heats) {
      box.querySelector(".now")?.remove();
      if (cells[state.column]) box.firstChild.append(frame(state.column * width, width));
    }
  }
  if (state.selected) renderDetail(state.selected);
}

function frame(x, width) {
  return make("rect", { class: "now", x: x.toFixed(2), y: 0.5, width: Math.max(width, 2).toFixed(2), height: ROW_HEIGHT - 1 });
}
