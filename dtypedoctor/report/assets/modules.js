// The data of the page: the tree of modules and what was measured in each.
//
// Per run there is one entry a module:
//   r root, f dotted name, c class,
//   s series  [lane, dtype, [absmax per column, -1 = not measured], {column: [nan, inf]}]
//   t tensors [what, phase, dtype, shape, absmax, nan, inf]
//   w flows   [phase, step, inputs, weights, outputs, autocast, why, operator that raised]
//   p dtypes of its own parameters
//   u lost updates [parameter, dtype, lost, of, percent, largest update in float32, largest weight]
// and the ops [module, phase, step, op, inputs, outputs, source, notes, born].
// A cell is {a: absmax, d: dtype, nan, inf}, or null where nothing was measured; in the lane "updates" it has share: true, and a is a percentage.

const data = JSON.parse(document.getElementById("data").textContent);

function buildTree() {
  const known = new Map();
  const at = (root, fqn) => {
    const key = `${root}:${fqn}`;
    if (!known.has(key)) {
      const dot = fqn.lastIndexOf(".");
      const parent = fqn === "" ? null : at(root, dot < 0 ? "" : fqn.slice(0, dot));
      const name = fqn.slice(dot + 1);
      const label = /^\d+$/.test(name) && parent ? `${parent.fqn === "" ? "model" : parent.label}[${name}]` : name;
      const node = { key, fqn, name, label, cls: "", parent, children: [], runs: [], cache: new Map() };
      known.set(key, node);
      if (parent) parent.children.push(node);
    }
    return known.get(key);
  };
  data.runs.forEach((run, index) => {
    for (const module of run.modules) {
      const node = at(module.r, module.f);
      node.cls = node.cls || module.c;
      node.runs[index] = module;
    }
  });
  const roots = [...known.values()].filter((node) => !node.parent);
  for (const root of roots) {
    root.label = root.cls || "model";
    squash(root);
  }
  return { nodes: [...known.values()].filter((node) => node.runs.some(Boolean)), roots };
}

/** Joins names such as base_model.model, of which only the last says anything. A number names nothing: it is shown with what it counts. */
function squash(node) {
  node.children = node.children.map((child) => {
    let kept = child;
    while (!kept.runs.some(Boolean) && kept.children.length === 1) {
      const [only] = kept.children;
      only.label = `${kept.label}${/^\d+$/.test(only.name) ? `[${only.name}]` : `.${only.name}`}`;
      kept = only;
    }
    kept.parent = node;
    squash(kept);
    return kept;
  });
}

const { nodes, roots } = buildTree();

/** The dotted name as it can be typed: model[1].up for 1.up. */
function fullName(node) {
  const index = /^\d+(\.\d+)*(?=\.|$)/.exec(node.fqn);
  if (!index) return node.fqn || node.label;
  return `model${index[0].split(".").map((number) => `[${number}]`).join("")}${node.fqn.slice(index[0].length)}`;
}

const flowsOf = (node, run) => (node.runs[run] ? node.runs[run].w : []);
const rootOf = (node) => (node.parent ? rootOf(node.parent) : node);

/** The step in which a model last did something new with its dtypes, not after `step`. */
function lastActive(root, step) {
  const below = (node) => [node, ...node.children.flatMap(below)];
  const steps = below(root).flatMap((node) => flowsOf(node, 0).map((flow) => flow[1]));
  return steps.reduce((last, one) => (one <= step ? Math.max(last, one) : last), -1);
}

/** The module of that name, of a longer name that ends in it, or of that class; where several models have one, that of the model which ran in `step`. */
function find(fqn, step = Infinity) {
  if (fqn === null || fqn === undefined) return null;
  const tests = [(node) => node.fqn === fqn, (node) => node.fqn.endsWith(`.${fqn}`), (node) => node.cls === fqn];
  const found = tests.map((test) => nodes.filter(test)).find((some) => some.length) || [];
  const active = new Map(found.map((node) => [node, found.length > 1 ? lastActive(rootOf(node), step ?? Infinity) : 0]));
  return found.find((node) => active.get(node) === Math.max(...active.values())) || null;
}

/** The modules that the findings blame, in the order of the findings; null where a finding blames none. */
const blamed = data.findings.map((finding) => find(finding.fqn, finding.step));
const tensorsOf = (node, run) => (node.runs[run] ? node.runs[run].t : []);
const updatesOf = (node, run) => (node.runs[run] ? node.runs[run].u : []);

const isIn = (lane, module) => (lane.name === "dtypes" ? module.w.length > 0 : module.s.some(([at]) => at === lane.index));

/** Lanes in which anything was measured. */
const lanes = data.lanes
  .map(([name, title], index) => ({ name, title, index }))
  .filter((lane) => nodes.some((node) => node.runs.some((module) => module && isIn(lane, module))));

const laneName = (index) => data.lanes[index][0];

// ------------------------------------------------------------------ magnitudes

/** Place of a magnitude between the smallest normal (0) and the largest (1) value of its dtype, logarithmic. */
function level(cell) {
  if (cell.share) return cell.a / 100;
  const dtype = data.dtypes[cell.d];
  if (!dtype) return null;
  if (cell.a <= dtype.tiny) return 0;
  return Math.min(1, Math.log2(cell.a / dtype.tiny) / Math.log2(dtype.max / dtype.tiny));
}

const isBad = (cell) => Boolean(cell && (cell.nan || cell.inf));

/** Where there are both, the inf is told: the NaN came of it. */
const badWord = (cell) => (cell.inf ? "inf" : cell.nan ? "NaN" : "");

const rank = (cell) => (cell.inf ? 3 : cell.nan ? 2 : level(cell) ?? -1);
const worse = (one, other) => (!one || (other && rank(other) > rank(one)) ? other : one);

/** The class with which a cell is drawn. */
function shade(cell) {
  if (isBad(cell)) return badWord(cell).toLowerCase();
  const place = level(cell);
  return place === null ? "other" : `l${Math.min(9, Math.floor(place * 10))}`;
}

function cached(node, key, compute) {
  if (!node.cache.has(key)) node.cache.set(key, compute());
  return node.cache.get(key);
}

function ownCells(node, run, lane) {
  return cached(node, `own ${run} ${lane}`, () => {
    const share = laneName(lane) === "updates";
    const cells = new Array(data.runs[run].columns.length).fill(null);
    for (const [at, dtype, values, bad] of node.runs[run] ? node.runs[run].s : []) {
      if (at !== lane) continue;
      values.forEach((value, column) => {
        const [nan, inf] = bad[column] || [0, 0];
        if (value >= 0) cells[column] = worse(cells[column], { a: value, d: dtype, nan, inf, share });
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

// ------------------------------------------------------------------ dtypes

const floating = (names) => unique(names.filter((name) => data.dtypes[name]).map(short));

/** The dtypes of all parameters in a module and below it. */
function weightsBelow(node, run) {
  return cached(node, `weights ${run}`, () => {
    const module = node.runs[run];
    const own = module ? [...module.p.map(short), ...floating(module.w.flatMap((flow) => flow[3]))] : [];
    return unique([...own, ...node.children.flatMap((child) => weightsBelow(child, run))]);
  });
}

/** The operators that raised in a module or below it. */
function raisedBelow(node, run) {
  return cached(node, `raised ${run}`, () =>
    unique([...flowsOf(node, run).map((flow) => flow[7]).filter(Boolean), ...node.children.flatMap((child) => raisedBelow(child, run))]));
}

/** What a row shows of dtypes: those of a module alone, of a closed one those of the weights below it too. */
const rowDtypes = (node, run, closed) => cached(node, `row ${run} ${closed}`, () => dtypesOfRow(node, run, closed));

function dtypesOfRow(node, run, closed) {
  const flows = flowsOf(node, run);
  const [into, out] = [floating(flows.flatMap((flow) => flow[2])), floating(flows.flatMap((flow) => flow[4]))];
  const module = node.runs[run];
  const own = module ? unique([...module.p.map(short), ...floating(flows.flatMap((flow) => flow[3]))]) : [];
  const raised = closed ? raisedBelow(node, run) : unique(flows.map((flow) => flow[7]).filter(Boolean));
  const why = unique(flows.map((flow) => flow[6]).filter(Boolean));
  return { into, weight: closed ? weightsBelow(node, run) : own, out, raised, why, differs: differs(into, out) || differs(into, own) };
}

const differs = (some, others) => some.length > 0 && others.length > 0 && unique([...some, ...others]).length > 1;

/** One word of it: what stands beside the row. */
function dtypesWord({ raised, differs: mixed }) {
  if (raised.length) return "raises";
  return mixed ? "differ" : "";
}

function describeDtypes({ into, weight, out, raised, why }) {
  const known = (names) => names.join(" and ") || "–";
  const parts = [`input ${known(into)}, weight ${known(weight)}, output ${known(out)}`];
  if (raised.length) parts.push(`${raised.join(", ")} raises`);
  return [...parts, ...why].join("; ");
}

// ------------------------------------------------------------------ words

const short = (dtype) => (data.dtypes[dtype] ? data.dtypes[dtype].short : dtype);
const count = (value) => value.toLocaleString("en");

function number(value) {
  if (value >= 1e4 && value < 1e6) return Math.round(value).toLocaleString("en-US");
  const rounded = Number(value.toPrecision(4));
  return value >= 1e6 || (value > 0 && value < 1e-4) ? rounded.toExponential().replace("e+", "e") : String(rounded);
}

function magnitude(cell) {
  if (cell.share) return `${cell.a}%`;
  const word = badWord(cell);
  if (!word) return number(cell.a);
  return cell.a > 0 ? `${word} ${number(cell.a)}` : word;
}

function describe(cell) {
  if (!cell) return "not measured";
  if (cell.share) return `${cell.a}% of the updates lost to rounding up to this step, ${cell.d}`;
  const dtype = data.dtypes[cell.d];
  const finite = !isBad(cell) || cell.a > 0;
  const parts = [finite ? `absmax ${number(cell.a)} in ${cell.d}` : `no finite element, ${cell.d}`];
  if (cell.inf) parts.push(`${count(cell.inf)} inf`);
  if (cell.nan) parts.push(`${count(cell.nan)} NaN`);
  if (!isBad(cell) && shade(cell) === "l9") parts.push("near the max, finite");
  if (dtype && cell.a > 0 && !isBad(cell)) parts.push(`${Number((100 * cell.a / dtype.max).toPrecision(2))}% of ${cell.d} max, ${number(dtype.max)}`);
  return parts.join(", ");
}
