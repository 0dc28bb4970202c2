// One module in full: its magnitude over the steps, dtypes, tensors, source and traced ops.

const CHART = { width: 360, height: 190, left: 48, right: 12, top: 16, bottom: 20 };
const MOST_OPS_SHOWN = 120;

function section(title, content) {
  return content ? [make("h4", {}, title), content] : [];
}

/** A table that can be scrolled with keys where it is wider than its place; `label` names it. */
function grid(label, header, rows) {
  if (!rows.length) return null;
  const head = make("tr", {}, header.map((cell) => make("th", { scope: "col" }, cell)));
  const body = rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, make("table", {}, make("thead", {}, head), make("tbody", {}, body)));
}

// ------------------------------------------------------------------ chart

/** Magnitudes over the steps, logarithmic, against the end of the dtype where that is not far beyond them. */
function chart(node) {
  if (showsDtypes() || laneName(state.lane) === "updates") return null;
  const lines = shownRuns().map((run) => ({ run, cells: ownCells(node, run, state.lane) }));
  const measured = lines.flatMap((line) => line.cells).filter((cell) => cell && cell.a > 0);
  if (!measured.length) return null;
  const dtype = data.dtypes[measured[0].d];
  const largest = Math.max(...measured.map((cell) => cell.a));
  const limit = dtype && dtype.max / largest < 1e6 ? dtype.max : null;
  const axes = scales(Math.max(...lines.map((line) => line.cells.length)), Math.min(...measured.map((cell) => cell.a)) / 2, Math.max(largest, limit || 0) * 2);
  const label = `absmax of ${fullName(node)} by step, logarithmic`;
  const svg = make(
    "svg",
    { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": label },
    chartGrid(axes),
    limit ? chartLimit(axes, dtype, lines) : null,
    lines.map((line) => chartLine(axes, line)),
    chartSteps(axes),
  );
  return make("figure", { class: "chart" }, svg, make("ul", { class: "legend" }, lines.map(({ run }) => legendEntry(run))));
}

function scales(columns, low, high) {
  const across = CHART.width - CHART.left - CHART.right;
  const down = CHART.height - CHART.top - CHART.bottom;
  return {
    columns,
    low,
    high,
    x: (column) => (CHART.left + (across * (column + 0.5)) / columns).toFixed(1),
    y: (value) => (CHART.top + (down * Math.log2(high / value)) / Math.log2(high / low)).toFixed(1),
  };
}

const across = (y, className) => make("path", { class: className, d: `M${CHART.left} ${y}H${CHART.width - CHART.right}` });
const lineClass = (run) => `run${run === state.left ? 0 : 1}`;

function chartGrid(axes) {
  return [0, 0.5, 1].map((part) => {
    const value = axes.high * (axes.low / axes.high) ** part;
    const y = axes.y(value);
    return [across(y, "grid"), make("text", { x: CHART.left - 5, y: Number(y) + 3, "text-anchor": "end" }, String(Number(value.toPrecision(2))))];
  });
}

function chartLimit(axes, dtype, lines) {
  const first = Math.min(...lines.map((line) => line.cells.findIndex(isBad)).filter((column) => column >= 0));
  const early = first < axes.columns / 2; // the words go where no mark is
  const x = early ? CHART.width - CHART.right - 2 : CHART.left + 3;
  const y = axes.y(dtype.max);
  const words = make("text", { class: "limit-text", x, y: Number(y) + 11, "text-anchor": early ? "end" : "start" }, `${dtype.short} max ${number(dtype.max)}`);
  return [across(y, "limit"), words];
}

function chartLine(axes, { run, cells }) {
  const marks = [];
  let path = "";
  let dots = "";
  cells.forEach((cell, column) => {
    if (!cell || cell.a <= 0) return;
    const [x, y] = [axes.x(column), axes.y(cell.a)];
    path += `${path && cells[column - 1] ? "L" : "M"}${x} ${y}`;
    dots += `M${x} ${y}h0`;
    if (isBad(cell)) {
      marks.push(make("path", { class: "limit", d: `M${x} ${CHART.top - 4}V${y}` }));
      marks.push(make("text", { class: "mark", x, y: CHART.top - 6, "text-anchor": "middle" }, badWord(cell)));
    }
  });
  const points = cells.length <= 60 ? make("path", { class: `dots ${lineClass(run)}`, d: dots }) : null;
  return [make("path", { class: `line ${lineClass(run)}`, d: path }), points, marks];
}

function chartSteps(axes) {
  const longest = shownRuns().map((run) => data.runs[run].columns).find((columns) => columns.length === axes.columns);
  const y = CHART.height - 5;
  const first = make("text", { x: axes.x(0), y, "text-anchor": "middle" }, longest[0]);
  return axes.columns > 1 ? [first, make("text", { x: axes.x(axes.columns - 1), y, "text-anchor": "end" }, `step ${longest.at(-1)}`)] : first;
}

function legendEntry(run) {
  const sample = make("path", { d: "M0 5H26", class: `line ${lineClass(run)}` });
  return make("li", {}, make("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, sample), data.runs[run].label);
}

// ------------------------------------------------------------------ lists and tables

function magnitudesNow(node) {
  const entries = shownRuns().flatMap((run) => lanes.map((lane) => ({ run, lane, cell: ownCells(node, run, lane.index)[state.column] })));
  const items = entries.filter((entry) => entry.cell).map(({ run, lane, cell }) =>
    make("li", {}, make("strong", {}, `${data.runs[run].label}, ${lane.title.toLowerCase()}: `), breakable(describe(cell))));
  return items.length ? make("ul", {}, items) : null;
}

function flowTable(node) {
  const words = (dtypes) => unique(dtypes.map(short)).join(" ") || "–";
  const why = (flow) => (flow[7] ? `${flow[7]} raises` : flow[6]) || (flow[5] ? `under autocast ${flow[5]}` : "–");
  const rows = shownRuns().flatMap((run) => flowsOf(node, run).map((flow) =>
    [data.runs[run].label, flow[0], `${words(flow[2])} → ${words(flow[4])}`, words(flow[3]), breakable(why(flow))]));
  return grid("Dtypes of the module", ["run", "phase", "in → out", "weights", "why"], rows);
}

function tensorTable(node) {
  const rows = tensorsOf(node, state.left).map(([what, phase, dtype, shape, absmax, nan, inf]) => {
    const largest = [number(absmax), inf ? `${count(inf)} inf` : null, nan ? `${count(nan)} NaN` : null].filter(Boolean).join(", ");
    return [what, phase, short(dtype), shape.join("×") || "scalar", breakable(largest)];
  });
  return grid("Tensors of the module", ["tensor", "phase", "dtype", "shape", "largest"], rows);
}

function updatesTable(node) {
  const rows = shownRuns().flatMap((run) => updatesOf(node, run).map(([name, dtype, lost, of, percent, update, absmax]) =>
    [data.runs[run].label, name, short(dtype), `${percent}% (${count(lost)} of ${count(of)})`, breakable(number(update)), breakable(number(absmax))]));
  return grid("Lost updates of the module", ["run", "parameter", "dtype", "lost", "largest update in float32", "largest weight"], rows);
}

function opItem([, phase, step, op, inputs, outputs, source, notes, born]) {
  return make(
    "li",
    { class: born ? "born" : null },
    make("strong", {}, breakable(op)),
    make("span", { class: "dim" }, breakable(`  ${phase}, step ${step}${source ? `, ${source}` : ""}`)),
    born ? make("div", { class: "born-text" }, "finite operands, non-finite result: originates here") : null,
    make("div", {}, breakable(`${inputs.join(" · ") || "–"}  →  ${outputs.join(" · ") || "–"}`)),
    notes.length ? make("div", { class: "dim" }, notes.join("; ")) : null,
  );
}

function renderDetail(node) {
  const told = data.findings.filter((finding, index) => blamed[index] === node);
  const ops = data.runs[state.left].ops.filter((op) => op[0] === node.fqn);
  const sources = unique([...told.map((finding) => finding.source), ...ops.map((op) => op[6])].filter(Boolean));
  const run = data.runs[state.left];
  ui.detail.replaceChildren(
    make("h3", {}, breakable(fullName(node)), " ", make("a", { class: "anchor", href: `#${encodeURIComponent(rowId(node))}`, "aria-label": "Link to this module" }, "#")),
    make("p", { class: "dim" }, node.cls || "container"),
    ...told.map((finding) => make("p", {}, make("span", { class: "tag origin" }, finding.id), " ", breakable(finding.summary))),
    ...section("Magnitude over the steps", chart(node)),
    ...section(`Step ${run.columns[state.column] ?? "–"}`, magnitudesNow(node)),
    ...section("Dtypes", flowTable(node)),
    ...section("Updates that rounding loses", updatesTable(node)),
    ...section(`Tensors over the whole run “${run.label}”`, tensorTable(node)),
    ...section("Source", sources.length ? make("p", {}, make("code", {}, breakable(sources.slice(0, 8).join("  ")))) : null),
    ...section(`Ops traced in it (${ops.length})`, ops.length ? make("ol", { class: "ops" }, ops.slice(0, MOST_OPS_SHOWN).map(opItem)) : null),
  );
}
