"use strict";

// The page's data holds, per run, one entry a module:
//   r root, f dotted name, c class,
//   s series  [lane, dtype, [absmax per column, -1 = not measured], {column: [nan, inf]}]
//   t tensors [what, phase, dtype, shape, absmax, nan, inf]
//   w flows   [phase, step, inputs, weights, outputs, autocast, why]
// and the ops [module, phase, step, op, inputs, outputs, source, notes, born]. All of it is shown as text, never as markup.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const SVG_TAGS = new Set(["svg", "path", "rect", "text", "g", "defs", "pattern", "title"]);
  const ROW_HEIGHT = 17;

  function make(tag, attributes, ...children) {
    const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (value >= 1e4 && value < 1e6) return String(Math.round(value));
    return value >= 1e6 || (value > 0 && value < 1e-4) ? String(Number(value.toPrecision(4)).toExponential()) : String(Number(value.toPrecision(4)));
  }

  const short = (dtype) => (data.dtypes[dtype] ? data.dtypes[dtype].short : dtype);
  const unique = (items) => [...new Set(items)];

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      getSelection().selectAllChildren(code);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected"; // without leave to write the clipboard the reader copies the selection
      }
    });
  }

  const closed = [...document.querySelectorAll("details:not([open])")];
  addEventListener("beforeprint", () => closed.forEach((part) => { part.open = true; }));
  addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));

  const explorer = document.getElementById("explorer");
  if (!explorer || !data.runs.length) return;

  // ---------------------------------------------------------------- the tree of modules

  function buildTree() {
    const nodes = new Map();
    const at = (root, fqn) => {
      const key = `${root}:${fqn}`;
      if (!nodes.has(key)) {
        const dot = fqn.lastIndexOf(".");
        const parent = fqn === "" ? null : at(root, dot < 0 ? "" : fqn.slice(0, dot));
        const node = { key, fqn, label: fqn.slice(dot + 1), cls: "", parent, children: [], runs: [], cache: new Map() };
        nodes.set(key, node);
        if (parent) parent.children.push(node);
      }
      return nodes.get(key);
    };
    data.runs.forEach((run, index) => {
      for (const module of run.modules) {
        const node = at(module.r, module.f);
        node.cls = node.cls || module.c;
        node.runs[index] = module;
      }
    });
    const roots = [...nodes.values()].filter((node) => !node.parent);
    for (const root of roots) {
      root.label = root.cls || "model";
      squash(root);
    }
    return { nodes: [...nodes.values()].filter((node) => node.runs.some(Boolean)), roots };
  }

  /** Joins names such as base_model.model, of which only the last says anything. */
  function squash(node) {
    node.children = node.children.map((child) => {
      let kept = child;
      while (!kept.runs.some(Boolean) && kept.children.length === 1) {
        const only = kept.children[0];
        only.label = `${kept.label}.${only.label}`;
        kept = only;
      }
      kept.parent = node;
      squash(kept);
      return kept;
    });
  }

  const { nodes, roots } = buildTree();

  // ---------------------------------------------------------------- magnitudes

  /** Place of a magnitude between the smallest normal (0) and the largest (1) value of its dtype. */
  function level(cell) {
    const dtype = data.dtypes[cell.d];
    if (!dtype) return null;
    return cell.a <= dtype.tiny ? 0 : Math.min(1, Math.log2(cell.a / dtype.tiny) / Math.log2(dtype.max / dtype.tiny));
  }

  const isBad = (cell) => Boolean(cell && (cell.nan || cell.inf));
  const rank = (cell) => (cell.inf ? 3 : cell.nan ? 2 : level(cell) ?? -1);
  const worse = (one, other) => (!one || (other && rank(other) > rank(one)) ? other : one);

  function kind(cell) {
    if (cell.inf) return "inf"; // where there are both, the NaN came of the inf
    if (cell.nan) return "nan";
    const place = level(cell);
    return place === null ? "other" : `l${Math.min(9, Math.floor(place * 10))}`;
  }

  function cached(node, key, compute) {
    if (!node.cache.has(key)) node.cache.set(key, compute());
    return node.cache.get(key);
  }

  function ownCells(node, run, lane) {
    return cached(node, `own ${run} ${lane}`, () => {
      const cells = new Array(data.runs[run].columns.length).fill(null);
      for (const [where, dtype, values, bad] of node.runs[run] ? node.runs[run].s : []) {
        if (where !== lane) continue;
        values.forEach((value, column) => {
          const [nan, inf] = bad[column] || [0, 0];
          if (value >= 0) cells[column] = worse(cells[column], { a: value, d: dtype, nan, inf });
        });
      }
      return cells;
    });
  }

  /** The worst of a module and of all that is below it: what a closed row stands for. */
  function subtreeCells(node, run, lane) {
    return cached(node, `all ${run} ${lane}`, () => {
      const cells = [...ownCells(node, run, lane)];
      for (const child of node.children) {
        subtreeCells(child, run, lane).forEach((cell, column) => { cells[column] = worse(cells[column], cell); });
      }
      return cells;
    });
  }

  function magnitude(cell) {
    const word = cell.inf ? "inf" : cell.nan ? "NaN" : "";
    return word && cell.a > 0 ? `${word} ${number(cell.a)}` : word || number(cell.a);
  }

  function describe(cell) {
    if (!cell) return "not measured";
    const dtype = data.dtypes[cell.d];
    const parts = [isBad(cell) && cell.a <= 0 ? `no finite element, ${cell.d}` : `absmax ${number(cell.a)} in ${cell.d}`];
    if (cell.inf) parts.push(`${cell.inf.toLocaleString("en")} inf`);
    if (cell.nan) parts.push(`${cell.nan.toLocaleString("en")} NaN`);
    if (dtype && cell.a > 0) parts.push(`${number(dtype.max / cell.a)}× below the largest, ${number(dtype.max)}`);
    return parts.join(", ");
  }

  // ---------------------------------------------------------------- what is shown

  const lanes = data.lanes.map(([name, title], index) => ({ name, title, index }))
    .filter((lane) => nodes.some((node) => node.runs.some((module) => module && module.s.some((series) => series[0] === lane.index))));
  const origin = data.findings.map((finding) => ({ finding, node: find(finding.fqn) })).find((place) => place.node) || null;
  const state = { left: 0, right: data.runs.length > 1 ? 1 : -1, lane: firstLane(), column: 0, text: "", bad: false, changes: false,
    near: false, open: new Set(), selected: null };

  function find(fqn) {
    if (fqn === null || fqn === undefined) return null;
    return nodes.find((node) => node.fqn === fqn) || nodes.find((node) => node.fqn.endsWith(`.${fqn}`)) || nodes.find((node) => node.cls === fqn) || null;
  }

  function firstLane() {
    const phase = origin ? origin.finding.phase : null;
    const wanted = lanes.find((lane) => lane.name === phase) || lanes[0];
    return wanted ? wanted.index : 0;
  }

  function columnOf(step) {
    const found = data.runs[state.left].columns.findIndex((label) => {
      const [first, last] = label.split("–").map(Number);
      return step >= first && step <= (last || first);
    });
    return Math.max(found, 0);
  }

  const shownRuns = () => [state.left, state.right].filter((run) => run >= 0);
  const isOpen = (node) => state.open.has(node.key);
  const shownCells = (node, run) => (isOpen(node) || !node.children.length ? ownCells : subtreeCells)(node, run, state.lane);
  const flowsOf = (node, run) => (node.runs[run] ? node.runs[run].w : []);
  const lanePhases = () => (data.lanes[state.lane][0] === "generate" ? ["generate"] : ["forward", "recompute"]);

  function matches(node) {
    const run = state.left;
    if (state.text && !`${node.fqn} ${node.cls}`.toLowerCase().includes(state.text)) return false;
    if (state.bad && !shownRuns().some((index) => ownCells(node, index, state.lane).some(isBad))) return false;
    if (state.changes && !flowsOf(node, run).some((flow) => flow[6])) return false;
    return !state.near || ownCells(node, run, state.lane).some((cell) => cell && (isBad(cell) || (level(cell) !== null && data.dtypes[cell.d].max / cell.a < 8)));
  }

  function visible() {
    const filtering = state.text || state.bad || state.changes || state.near;
    const rows = [];
    let found = 0;
    const walk = (node, depth) => {
      const at = rows.length;
      const hit = !filtering || (node.runs.some(Boolean) && matches(node));
      rows.push({ node, depth, context: !hit });
      if (hit && node.runs.some(Boolean)) found += 1;
      if (filtering || isOpen(node)) node.children.forEach((child) => walk(child, depth + 1));
      if (filtering && !hit && rows.length === at + 1) rows.pop();
    };
    roots.forEach((root) => walk(root, 0));
    return { rows, found: filtering ? found : nodes.length };
  }

  // ---------------------------------------------------------------- rows

  const ui = buildTools();
  let drawn = [];

  /** Runs side by side share one scale of steps, so that one ending early is seen to. */
  function columnWidth() {
    const heads = ui.heads.querySelector(".heat");
    const room = heads ? heads.clientWidth : 300;
    return Math.min(28, room / Math.max(...shownRuns().map((run) => data.runs[run].columns.length)));
  }

  function heat(cells, width) {
    const paths = new Map();
    const apart = width >= 6 ? 1 : 0;
    for (let i = 0; i < cells.length; ) {
      const shade = cells[i] ? kind(cells[i]) : null;
      let end = i + 1;
      while (!apart && end < cells.length && cells[end] && kind(cells[end]) === shade) end += 1;
      if (shade) {
        const length = ((end - i) * width - apart).toFixed(2);
        paths.set(shade, `${paths.get(shade) || ""}M${(i * width).toFixed(2)} 1h${length}v15h-${length}z`);
      }
      i = end;
    }
    const total = (cells.length * width).toFixed(2);
    const svg = make("svg", { viewBox: `0 0 ${total} ${ROW_HEIGHT}`, width: total, height: ROW_HEIGHT, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const [shade, d] of paths) svg.append(make("path", { d, class: `cell ${shade}` }));
    return svg;
  }

  function typesText(node) {
    const flows = flowsOf(node, state.left).filter((flow) => lanePhases().includes(flow[0]));
    const floating = (names) => unique(names.filter((name) => data.dtypes[name]).map(short)).join(" ");
    const texts = unique(flows.map((flow) => {
      const [into, out] = [floating(flow[2]), floating(flow[4])];
      return into && into !== out ? `${into}→${out}` : out;
    }).filter(Boolean));
    return { text: texts.join(", "), why: unique(flows.map((flow) => flow[6]).filter(Boolean)).join("; ") };
  }

  function tags(node) {
    const found = [];
    data.findings.forEach((finding, index) => {
      if (find(finding.fqn) === node) {
        found.push(make("span", { class: "tag origin", title: finding.summary }, index ? `FINDING ${index + 1}` : "ORIGIN"));
      }
    });
    const cells = shownCells(node, state.left);
    const first = cells.findIndex(isBad);
    if (first >= 0) {
      const word = cells[first].inf ? "inf" : "NaN";
      found.push(make("span", { class: "tag" }, `${word} @ ${data.runs[state.left].columns[first]}`));
    }
    return found;
  }

  function makeRow({ node, depth, context }) {
    const parent = node.children.length > 0;
    const types = typesText(node);
    const name = make("div", { class: "name", role: "gridcell" },
      make("span", { class: "twist", "aria-hidden": "true" }, parent ? (isOpen(node) ? "▾" : "▸") : ""),
      make("b", { title: node.fqn || node.label }, node.label), tags(node), make("span", { class: "dim" }, node.parent ? node.cls : ""));
    name.style.setProperty("--depth", depth);
    const value = make("div", { class: "value", role: "gridcell" });
    value.style.setProperty("--depth", depth);
    const heats = shownRuns().map((run) => {
      const cells = shownCells(node, run);
      return { run, cells, box: make("div", { class: "heat", role: "gridcell", "data-run": run }, heat(cells, columnWidth())) };
    });
    const element = make("div", { class: context ? "row context" : "row", role: "row", tabindex: "-1", "aria-level": depth + 1,
      "aria-expanded": parent ? String(isOpen(node)) : null, "aria-selected": String(state.selected === node), "data-key": node.key },
      name, make("div", { class: types.why ? "types changes" : "types", role: "gridcell", title: types.why || null }, types.text),
      value, heats.map((part) => part.box));
    return { node, element, value, heats };
  }

  function renderRows() {
    const focused = document.activeElement && document.activeElement.closest(".row");
    const key = focused ? focused.dataset.key : null;
    const { rows, found } = visible();
    ui.rows.style.setProperty("--runs", shownRuns().length);
    renderHeads();
    drawn.forEach((row) => row.element.remove());
    ui.rows.querySelector(".empty")?.remove();
    drawn = rows.map(makeRow);
    ui.rows.append(...drawn.map((row) => row.element));
    if (!drawn.length) ui.rows.append(make("p", { class: "empty" }, "No module matches. Clear the filter to see all of them."));
    const entry = drawn.find((row) => row.node.key === key) || drawn.find((row) => row.node === state.selected) || drawn[0];
    if (entry) entry.element.tabIndex = 0;
    if (key && entry && entry.node.key === key) entry.element.focus({ preventScroll: true });
    ui.count.textContent = `${found} of ${nodes.length} modules`;
    renderStep();
  }

  function renderHeads() {
    const headings = shownRuns().map((run) => make("div", { class: "heat", role: "columnheader" }, make("strong", {}, data.runs[run].label)));
    ui.heads.replaceChildren(make("div", { class: "only-wide", role: "columnheader" }, "module"), make("div", { class: "only-wide", role: "columnheader" }, "dtype in→out"),
      make("div", { class: "only-wide value", role: "columnheader" }, "absmax"), ...headings);
    shownRuns().forEach((run, index) => headings[index].append(axis(run)));
  }

  function axis(run) {
    const width = columnWidth();
    const { columns } = data.runs[run];
    const every = Math.max(1, Math.ceil(34 / width));
    const svg = make("svg", { width: (columns.length * width).toFixed(2), height: 13, "aria-hidden": "true" });
    columns.forEach((label, i) => {
      if (i % every === 0) svg.append(make("text", { x: (i * width).toFixed(1), y: 10 }, label.split("–")[0]));
    });
    return svg;
  }

  function renderStep() {
    const label = data.runs[state.left].columns[state.column];
    ui.step.value = state.column;
    ui.stepText.textContent = label;
    for (const { node, value, heats } of drawn) {
      const cell = shownCells(node, state.left)[state.column];
      value.textContent = cell ? magnitude(cell) : "";
      value.classList.toggle("bad-value", isBad(cell));
      value.title = describe(cell);
      for (const { run, box } of heats) {
        box.querySelector(".now")?.remove();
        const width = columnWidth();
        if (state.column < data.runs[run].columns.length) {
          box.firstChild.append(make("rect", { class: "now", x: (state.column * width).toFixed(2), y: 0.5, width: Math.max(width, 2).toFixed(2), height: ROW_HEIGHT - 1 }));
        }
      }
    }
    if (state.selected) renderDetail(state.selected);
  }

  // ---------------------------------------------------------------- one module

  function section(title, ...content) {
    return content.flat().filter(Boolean).length ? [make("h4", {}, title), ...content.flat()] : [];
  }

  function grid(header, rows) {
    if (!rows.length) return null;
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, header.map((cell) => make("th", { scope: "col" }, cell)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell)))))));
  }

  function chart(node) {
    const series = shownRuns().map((run) => ({ run, cells: ownCells(node, run, state.lane) }));
    const known = series.flatMap((line) => line.cells).filter((cell) => cell && cell.a > 0);
    if (!known.length) return null;
    const dtype = data.dtypes[ownCells(node, state.left, state.lane).find(Boolean)?.d ?? known[0].d];
    let high = Math.max(...known.map((cell) => cell.a)) * 2;
    const low = Math.min(...known.map((cell) => cell.a)) / 2;
    if (dtype && dtype.max / high < 1e6) high = Math.max(high, dtype.max * 2);
    const [width, height, left, top, bottom] = [360, 190, 48, 14, 20];
    const most = Math.max(...series.map((line) => line.cells.length));
    const x = (column) => left + ((width - left - 12) * (column + 0.5)) / most;
    const y = (value) => top + ((height - top - bottom) * Math.log2(high / value)) / Math.log2(high / low);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `absmax of ${node.fqn} by step, logarithmic` });
    for (const part of [0, 0.5, 1]) {
      const value = high * (low / high) ** part;
      svg.append(make("path", { class: "grid", d: `M${left} ${y(value).toFixed(1)}H${width - 12}` }),
        make("text", { x: left - 5, y: y(value) + 3, "text-anchor": "end" }, Number(value.toPrecision(2)).toString()));
    }
    if (dtype && dtype.max <= high) {
      const early = series.some((line) => line.cells.findIndex(isBad) >= 0 && line.cells.findIndex(isBad) < most / 2);
      svg.append(make("path", { class: "limit", d: `M${left} ${y(dtype.max).toFixed(1)}H${width - 12}` }),
        make("text", { class: "limit-text", x: early ? width - 14 : left + 3, y: y(dtype.max) + 11, "text-anchor": early ? "end" : "start" }, `${dtype.short} ends at ${number(dtype.max)}`));
    }
    for (const { run, cells } of series) {
      let path = "";
      let dots = "";
      cells.forEach((cell, column) => {
        if (!cell || cell.a <= 0) return;
        const place = `${x(column).toFixed(1)} ${y(cell.a).toFixed(1)}`;
        path += `${path && cells[column - 1] ? "L" : "M"}${place}`;
        dots += `M${place}h0`;
        if (isBad(cell)) svg.append(make("path", { class: "limit", d: `M${x(column).toFixed(1)} ${top - 2}V${y(cell.a).toFixed(1)}` }),
          make("text", { class: "mark", x: x(column), y: top - 4, "text-anchor": "middle" }, cell.inf ? "inf" : "NaN"));
      });
      const style = `run${run === state.left ? 0 : 1}`;
      svg.append(make("path", { class: `line ${style}`, d: path }));
      if (cells.length <= 60) svg.append(make("path", { class: `dots ${style}`, d: dots }));
    }
    const { columns } = data.runs[state.left];
    svg.append(make("text", { x: x(0), y: height - 5, "text-anchor": "middle" }, columns[0]));
    if (most > 1) svg.append(make("text", { x: x(most - 1), y: height - 5, "text-anchor": "end" }, `step ${data.runs[series.length > 1 ? state.right : state.left].columns.at(-1)}`));
    const legend = make("ul", { class: "legend" }, series.map(({ run }) => make("li", {},
      make("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, make("path", { d: "M0 5H26", class: `line run${run === state.left ? 0 : 1}` })), data.runs[run].label)));
    return make("figure", { class: "chart" }, svg, legend);
  }

  function opItem([, phase, step, op, inputs, outputs, source, notes, born]) {
    return make("li", { class: born ? "born" : "" }, make("strong", {}, op), make("span", { class: "dim" }, `  ${phase}, step ${step}${source ? `, ${source}` : ""}`),
      born ? make("div", { class: "born-text" }, "finite operands, non-finite result: born here") : null,
      make("div", {}, `${inputs.join(" · ") || "–"}  →  ${outputs.join(" · ") || "–"}`), notes.length ? make("div", { class: "dim" }, notes.join("; ")) : null);
  }

  function renderDetail(node) {
    const title = node.fqn || node.label;
    const told = data.findings.filter((finding) => find(finding.fqn) === node);
    const step = data.runs[state.left].columns[state.column];
    const now = shownRuns().flatMap((run) => lanes.map((lane) => ({ run, lane, cell: ownCells(node, run, lane.index)[state.column] })))
      .filter((entry) => entry.cell).map(({ run, lane, cell }) => make("li", {}, make("strong", {}, `${data.runs[run].label}, ${lane.title.toLowerCase()}: `), describe(cell)));
    const flows = shownRuns().flatMap((run) => flowsOf(node, run).map((flow) => [data.runs[run].label, flow[0],
      `${unique(flow[2].map(short)).join(" ") || "–"} → ${unique(flow[4].map(short)).join(" ") || "–"}`, unique(flow[3].map(short)).join(" ") || "–", flow[6] || (flow[5] ? `under autocast ${flow[5]}` : "–")]));
    const tensors = (node.runs[state.left] ? node.runs[state.left].t : []).map((tensor) => [tensor[0], tensor[1], short(tensor[2]), tensor[3].join("×") || "scalar",
      number(tensor[4]) + (tensor[6] ? `, ${tensor[6].toLocaleString("en")} inf` : "") + (tensor[5] ? `, ${tensor[5].toLocaleString("en")} NaN` : "")]);
    const ops = data.runs[state.left].ops.filter((op) => op[0] === node.fqn);
    const sources = unique([...told.map((finding) => finding.source), ...ops.map((op) => op[6])].filter(Boolean));
    ui.detail.replaceChildren(make("h3", {}, title), make("p", { class: "dim" }, node.cls || "container"),
      ...told.map((finding) => make("p", {}, make("span", { class: "tag origin" }, finding.id), " ", finding.summary)),
      ...section("Magnitude over the steps", chart(node)),
      ...section(`Step ${step}`, now.length ? make("ul", {}, now) : null),
      ...section("Dtypes", grid(["run", "phase", "in → out", "weights", "why"], flows)),
      ...section(`Tensors over the whole run “${data.runs[state.left].label}”`, grid(["tensor", "phase", "dtype", "shape", "largest"], tensors)),
      ...section("Source", sources.length ? make("p", {}, make("code", {}, sources.slice(0, 8).join("  "))) : null),
      ...section(`Ops traced in it (${ops.length})`, ops.length ? make("ol", { class: "ops" }, ops.slice(0, 120).map(opItem)) : null));
  }

  function select(node) {
    state.selected = node;
    for (const row of drawn) row.element.setAttribute("aria-selected", String(row.node === node));
    renderDetail(node);
  }

  function reveal(node) {
    for (let up = node.parent; up; up = up.parent) state.open.add(up.key);
    Object.assign(state, { text: "", bad: false, changes: false, near: false });
    ui.search.value = "";
    ui.toggles.forEach((toggle) => toggle.setAttribute("aria-pressed", "false"));
    state.selected = node;
    renderRows();
    focusRow(drawn.findIndex((row) => row.node === node));
  }

  function showOrigin() {
    if (!origin) return;
    if (origin.finding.step !== null) state.column = columnOf(origin.finding.step);
    reveal(origin.node);
  }

  // ---------------------------------------------------------------- tools, mouse and keys

  function buildTools() {
    const toggle = (title, key) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, title);
      button.addEventListener("click", () => {
        state[key] = !state[key];
        button.setAttribute("aria-pressed", String(state[key]));
        renderRows();
      });
      return button;
    };
    const search = make("input", { type: "search", placeholder: "Filter by name or class", "aria-label": "Filter modules by name or class" });
    search.addEventListener("input", () => { state.text = search.value.trim().toLowerCase(); renderRows(); });
    const toggles = [toggle("not finite", "bad"), toggle("within 8× of the limit", "near"), toggle("dtype changes", "changes")];
    const laneButtons = lanes.map((lane) => make("button", { type: "button", "data-lane": lane.index, "aria-pressed": String(lane.index === state.lane) }, lane.title));
    laneButtons.forEach((button) => button.addEventListener("click", () => {
      state.lane = Number(button.dataset.lane);
      laneButtons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      renderRows();
    }));
    const step = make("input", { type: "range", min: 0, max: Math.max(...data.runs.map((run) => run.columns.length)) - 1, value: 0, "aria-label": "Step" });
    step.addEventListener("input", () => setColumn(Number(step.value)));
    const stepText = make("strong", {});
    const goto = make("button", { type: "button", id: "to-origin" }, "Go to the origin");
    goto.addEventListener("click", showOrigin);
    const count = make("p", { class: "count", role: "status" });
    const heads = make("div", { class: "heads", role: "row" });
    const rows = make("div", { class: "rows", role: "treegrid", "aria-label": "Modules and their magnitudes" }, heads);
    const detail = make("div", { class: "detail", "aria-live": "polite", "aria-label": "The selected module" }, make("p", { class: "dim" }, "Choose a module to see its tensors, dtypes and ops."));
    const keys = [["↑ ↓", "module"], ["← →", "close, open"], [", .", "step"], ["/", "filter"], ["o", "origin"], ["Enter", "details"]];
    explorer.append(patterns(),
      make("div", { class: "tools" }, make("span", { class: "group", role: "group", "aria-label": "What is measured" }, laneButtons),
        origin ? goto : null, make("label", {}, "step", step, stepText)),
      make("div", { class: "tools" }, search, make("span", { class: "group", role: "group", "aria-label": "Show only" }, toggles), ...runPickers(), count),
      scale(), make("div", { class: "panes" }, rows, detail),
      make("p", { class: "keys" }, keys.map(([key, does]) => [make("kbd", {}, key), ` ${does}  `])));
    return { search, toggles, step, stepText, count, heads, rows, detail };
  }

  function runPickers() {
    if (data.runs.length < 2) return [];
    return ["left", "right"].map((side) => {
      const options = data.runs.map((run, index) => make("option", { value: index, selected: index === state[side] }, run.label));
      if (side === "right") options.push(make("option", { value: -1 }, "(nothing)"));
      const picker = make("select", { id: `run-${side}` }, options);
      picker.addEventListener("change", () => {
        state[side] = Number(picker.value);
        state.column = Math.min(state.column, data.runs[state.left].columns.length - 1);
        renderRows();
      });
      return make("label", {}, side === "left" ? "compare" : "with", picker);
    });
  }

  function patterns() {
    const pattern = (name, d) => make("pattern", { id: `hatch-${name}`, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      make("rect", { class: `hatch-${name}-back`, width: 5, height: 5 }), make("path", { class: "hatch-line", d }));
    return make("svg", { width: 0, height: 0, "aria-hidden": "true" }, make("defs", {}, pattern("inf", "M-1 6L6 -1"), pattern("nan", "M2.5 0V5")));
  }

  function scale() {
    const swatch = (shade, width) => make("rect", { class: `cell ${shade}`, width, height: 12 });
    const steps = make("svg", { width: 200, height: 12, "aria-hidden": "true" });
    for (let i = 0; i < 10; i += 1) {
      const part = swatch(`l${i}`, 20);
      part.setAttribute("x", i * 20);
      steps.append(part);
    }
    const used = unique(data.runs.flatMap((run) => run.modules.flatMap((module) => module.s.map((series) => series[1])))).filter((name) => data.dtypes[name]);
    const ends = used.map((name) => `${data.dtypes[name].short} ${number(data.dtypes[name].tiny)} … ${number(data.dtypes[name].max)}`);
    return make("div", { class: "scale" }, make("span", {}, "smallest normal ", steps, " largest"), make("span", {}, make("svg", { width: 24, height: 12, "aria-hidden": "true" }, swatch("inf", 24)), " inf"),
      make("span", {}, make("svg", { width: 24, height: 12, "aria-hidden": "true" }, swatch("nan", 24)), " NaN"), make("span", {}, ends.join(" · ")));
  }

  function setColumn(column) {
    state.column = Math.max(0, Math.min(column, Number(ui.step.max)));
    renderStep();
  }

  function focusRow(index) {
    const row = drawn[Math.max(0, Math.min(index, drawn.length - 1))];
    if (!row) return;
    drawn.forEach((other) => { other.element.tabIndex = -1; });
    row.element.tabIndex = 0;
    row.element.focus({ preventScroll: true });
    row.element.scrollIntoView({ block: "nearest" });
  }

  function toggleRow(node, open) {
    if (open) state.open.add(node.key);
    else state.open.delete(node.key);
    renderRows();
  }

  function rowKey(event, index) {
    const { node } = drawn[index];
    const parent = drawn.findIndex((row) => row.node === node.parent);
    const moves = {
      ArrowDown: () => focusRow(index + 1),
      ArrowUp: () => focusRow(index - 1),
      Home: () => focusRow(0),
      End: () => focusRow(drawn.length - 1),
      ArrowRight: () => (node.children.length && !isOpen(node) ? toggleRow(node, true) : focusRow(index + 1)),
      ArrowLeft: () => (node.children.length && isOpen(node) ? toggleRow(node, false) : parent >= 0 && focusRow(parent)),
      Enter: () => select(node),
      " ": () => select(node),
      ".": () => setColumn(state.column + 1),
      ",": () => setColumn(state.column - 1),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  const rowAt = (target) => drawn.findIndex((row) => row.element === target.closest(".row"));

  ui.rows.addEventListener("keydown", (event) => {
    const index = rowAt(event.target);
    if (index >= 0 && !event.ctrlKey && !event.metaKey && !event.altKey) rowKey(event, index);
  });
  ui.rows.addEventListener("click", (event) => {
    const index = rowAt(event.target);
    if (index < 0) return;
    const { node } = drawn[index];
    const place = cellAt(event);
    if (place) setColumn(place.column);
    select(node);
    if (event.target.closest(".twist") && node.children.length) toggleRow(node, !isOpen(node));
    else focusRow(index);
  });
  ui.rows.addEventListener("dblclick", (event) => {
    const row = drawn[rowAt(event.target)];
    if (row && row.node.children.length && !event.target.closest(".twist, .heat")) toggleRow(row.node, !isOpen(row.node));
  });

  function cellAt(event) {
    const svg = event.target.closest(".row .heat svg");
    const row = drawn[rowAt(event.target)];
    if (!svg || !row) return null;
    const { run, cells } = row.heats.find((part) => part.box.contains(svg));
    const box = svg.getBoundingClientRect();
    const column = Math.min(cells.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * cells.length)));
    return { run, column, cell: cells[column], node: row.node };
  }

  const tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  document.body.append(tip);
  ui.rows.addEventListener("mousemove", (event) => {
    const place = cellAt(event);
    tip.hidden = !place;
    if (!place) return;
    tip.textContent = `${place.node.fqn || place.node.label}\n${data.runs[place.run].label}, step ${data.runs[place.run].columns[place.column]}\n${describe(place.cell)}`;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
  ui.rows.addEventListener("mouseleave", () => { tip.hidden = true; });

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Escape" && event.target === ui.search) {
        ui.search.value = state.text = "";
        renderRows();
        focusRow(drawn.findIndex((row) => row.node === state.selected));
      }
      return;
    }
    if (event.key === "/") {
      event.preventDefault();
      ui.search.focus();
    } else if (event.key === "o") {
      showOrigin();
    }
  });
  for (const button of document.querySelectorAll(".goto")) {
    button.addEventListener("click", () => {
      const node = find(button.dataset.fqn);
      if (!node) return;
      if (origin && node === origin.node) showOrigin();
      else reveal(node);
      document.getElementById("map").scrollIntoView();
    });
  }

  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(ui.rows.clientWidth - width) < 2) return;
    width = ui.rows.clientWidth;
    requestAnimationFrame(renderRows);
  }).observe(ui.rows);

  // At first a small model is open all over; of a large one only the way to the origin is.
  const few = nodes.length <= 80;
  for (const node of nodes) {
    for (let up = few ? node : node.parent && node.fqn.split(".").length <= 2 ? node.parent : null; up; up = up.parent) state.open.add(up.key);
  }
  if (origin) {
    for (let up = origin.node; up; up = up.parent) state.open.add(up.key);
    if (origin.finding.step !== null) state.column = columnOf(origin.finding.step);
    state.selected = origin.node;
  }
  roots.forEach((root) => state.open.add(root.key));
  width = ui.rows.clientWidth;
  renderRows();
  const chosen = drawn.find((row) => row.node === state.selected);
  if (chosen) ui.rows.scrollTop = chosen.element.offsetTop - ui.rows.clientHeight / 2;
})();
