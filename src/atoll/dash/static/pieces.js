// The pieces of the report and of the live page: each draws one part of a run into a node, from plain data.
// Text from a run only ever becomes textContent. Curves are uPlot's; lanes and bars are boxes.
const Atoll = (() => {
  "use strict";
  const HUES = 8;
  const LEGEND = [
    ["compute", "training"], ["slow", "training at less than half its usual speed"], ["stall", "waiting on Atoll"],
    ["evaluate", "testing the published model"], ["recovery", "restarting"], ["down", "away, or no process"],
    ["idle", "up, not stepping"],
  ];

  // ---------------------------------------------------------------- small things
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hue = (i) => css(`--l${i % HUES}`);

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") Object.assign(node.style, value);
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
    return node;
  }

  function scaled(value, units, gap) {
    if (value === null || !isFinite(value)) return "-";
    let unit = 0;
    while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    const text = unit === 0 ? String(Math.round(value * 100) / 100) : Number(value.toPrecision(3)).toString();
    return units[unit] ? text + gap + units[unit] : text;
  }
  const count = (value) => scaled(value, ["", "k", "M", "G", "T", "P"], "");
  const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], " ");
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  function clock(seconds) {
    const s = Math.max(0, Math.floor(seconds)), hours = Math.floor(s / 3600);
    return hours ? `${hours}:${two((s % 3600) / 60)}:${two(s % 60)}` : `${two(s / 60)}:${two(s % 60)}`;
  }
  function span(seconds) {
    if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
    return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  // ---------------------------------------------------------------- curves
  const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

  function axes(options) {
    const line = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const x = { ...line, size: 30, space: 60, values: (u, values) => values.map(options.x === "time" ? clock : count) };
    if (options.x === "time") x.incrs = CLOCK_STEPS;
    return [x, { ...line, size: 52, space: 34, values: (u, values) => values.map(options.y || ((v) => String(Number(v.toPrecision(6))))) }];
  }

  // Pale bands for as long as faults lasted, and dashed lines where the run was stopped and resumed.
  function background(node) {
    return (u) => {
      const { faults = [], pauses = [] } = node.atollMarks || {};
      const { left, top, width, height } = u.bbox, x = (s) => Math.min(left + width, Math.max(left, u.valToPos(s, "x", true)));
      u.ctx.save();
      u.ctx.fillStyle = css("--band");
      for (const fault of faults) u.ctx.fillRect(x(fault.from), top, Math.max(2, x(fault.to) - x(fault.from)), height);
      u.ctx.strokeStyle = css("--soft");
      u.ctx.setLineDash([4, 4]);
      for (const [at] of pauses) { u.ctx.beginPath(); u.ctx.moveTo(x(at), top); u.ctx.lineTo(x(at), top + height); u.ctx.stroke(); }
      u.ctx.restore();
    };
  }

  // curves: [{label, color, width, data: [xs, ys], points}]. The chart is made once, and made again when its curves change.
  function chart(node, curves, options = {}) {
    const shown = curves.filter((one) => one.data[0].length);
    node.atollMarks = options.marks;
    // A hole in one curve (null) stays a hole where the others have points (mode 2).
    const data = shown.length ? uPlot.join(shown.map((one) => one.data), shown.map((one) => one.data.map(() => 2))) : [[0, 1], [null, null]];
    const shape = JSON.stringify([shown.map((one) => [one.label, one.color, one.width, one.dots]), options.x, css("--ink")]);
    node.atollRange = options.range;
    if (node.atollChart && node.atollShape === shape) return node.atollChart.setData(data);
    if (node.atollChart) node.atollChart.destroy();
    const size = () => ({ width: Math.max(120, node.clientWidth), height: options.height || 260 });
    const range = (u, low, high) => node.atollRange || (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));
    const series = shown.map((one) => ({
      label: one.label, stroke: one.color, width: one.width ?? 1.5, spanGaps: false, fill: one.fill, paths: one.points ? () => null : undefined,
      points: { show: one.points || one.dots || false, size: 5, width: one.hollow ? 1.3 : 0, fill: one.hollow ? css("--card") : one.color, stroke: one.color },
      value: (u, value) => (value === null || value === undefined ? "-" : (options.y || ((v) => Number(v.toPrecision(4))))(value)),
    }));
    node.replaceChildren();
    node.atollShape = shape;
    node.atollChart = new uPlot({
      ...size(), padding: [8, 10, 0, 0], cursor: { y: false, points: { size: 6 } },
      legend: { show: options.legend ?? false, live: true },
      scales: { x: { time: false, range: (u, low, high) => [options.x === "time" || options.x === "tokens" ? 0 : low, Math.max(high, 1e-3)] }, y: { range } },
      axes: axes(options), hooks: { drawClear: [background(node)] },
      series: [{ label: options.x === "time" ? "time" : "tokens", value: (u, v) => (v === null ? "-" : options.x === "time" ? clock(v) : count(v)) },
        ...(series.length ? series : [{}])],
    }, data, node);
    if (!node.atollSized) {
      node.atollSized = new ResizeObserver(() => {
        if (node.atollChart && Math.abs(node.atollChart.width - node.clientWidth) > 1) node.atollChart.setSize(size());
      });
      node.atollSized.observe(node);
    }
    return node.atollChart;
  }

  function lossChart(node, run, x) {
    const many = run.loss.trains.length > HUES;
    const trains = run.loss.trains.map((one, i) => ({ label: one.learner, color: hue(i) + (many ? "55" : "88"), width: 1, data: one[x] }));
    const published = { label: "published model", color: css("--eval"), width: 2.4, data: run.loss[x], dots: run.loss[x][0].length < 60 };
    const marks = x === "time" ? { faults: run.faults, pauses: run.pauses } : {};
    chart(node, [...trains, published], { x, range: run.loss.range, marks, legend: false });
  }

  function rateChart(node, run) {
    const curves = run.rates.map((one, i) => one.learner
      ? { label: one.learner, color: hue(run.rates.length > 1 ? i - 1 : i), width: 1.3, data: one.time }
      : { label: "all", color: css("--accent"), width: 2, fill: css("--wash"), data: one.time });
    chart(node, curves, { x: "time", y: count, marks: { faults: run.faults, pauses: run.pauses } });
  }

  function commitChart(node, run) {
    const { time, merged, asked } = run.commits;
    const pick = (full) => [time.filter((_, i) => (merged[i] >= asked[i]) === full), merged.filter((m, i) => (m >= asked[i]) === full)];
    const top = Math.max(1, ...asked, ...merged);
    chart(node, [
      { label: "all that were asked", color: hue(0), points: true, data: pick(true) },
      { label: "not all in time", color: hue(1), points: true, hollow: true, data: pick(false) },
    ], { x: "time", range: [0, top * 1.12 + 0.25], marks: { faults: run.faults, pauses: run.pauses }, height: 220 });
  }

  function rhoChart(node, run) {
    chart(node, [
      { label: "rho", color: hue(2) + "66", points: true, data: run.commits.rho },
      { label: "mean", color: hue(2), width: 2.2, data: run.commits.rho_mean },
    ], { x: "time", height: 220 });
  }

  // ---------------------------------------------------------------- lanes
  // One lane is one canvas: what the learner did as boxes, contributions as dots, faults as flags above.
  function drawLane(canvas, lane, seconds) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d"), x = (s) => (seconds > 0 ? (s / seconds) * width : 0), top = 6, high = height - top;
    pen.scale(ratio, ratio);
    for (const [from, to, name, stall] of lane.stretches || []) {
      const left = x(from), wide = Math.max(0.6, x(to) - left);
      pen.fillStyle = css(`--${name}`);
      pen.fillRect(left, top, wide, high);
      if (stall) { pen.fillStyle = css("--stall"); pen.fillRect(left, top, wide, high * stall); }
    }
    pen.fillStyle = css("--link");
    for (const [from, to] of lane.cuts || []) pen.fillRect(x(from), height - 3, Math.max(1.5, x(to) - x(from)), 3);
    for (const [at, late] of lane.marks || []) {
      pen.beginPath();
      pen.arc(x(at), top + high * (late ? 0.3 : 0.62), late ? 2 : 1.5, 0, 7);
      if (late) { pen.strokeStyle = css("--fault"); pen.stroke(); } else { pen.fillStyle = css("--dot"); pen.fill(); }
    }
    pen.fillStyle = css("--fault");
    for (const [at] of lane.flags || []) {
      pen.beginPath(); pen.moveTo(x(at) - 4, 0); pen.lineTo(x(at) + 4, 0); pen.lineTo(x(at), 6); pen.fill();
    }
  }

  function tipOf(lane, at, meaning) {
    const flag = (lane.flags || []).filter(([s]) => Math.abs(s - at) < 1.5).map(([s, text]) => `${clock(s)} ${text}`);
    const found = (lane.stretches || []).find(([from, to]) => from <= at && at <= to);
    const what = found ? [`${clock(found[0])} to ${clock(found[1])}: ${meaning[found[2]] || "training slowly"}`] : [];
    return [...flag, ...what].join("; ");
  }

  function laneCanvas(label) {
    return el("canvas", { class: "lane", role: "img", "aria-label": label });
  }

  function lanesPiece(node, run) {
    const entries = Object.entries(run.lanes || {});
    const made = entries.map(([learner, lane], i) => {
      const canvas = laneCanvas(`what ${learner} was doing`);
      canvas.addEventListener("mousemove", (event) => {
        canvas.title = tipOf(lane, (event.offsetX / canvas.clientWidth) * run.seconds, run.meaning);
      });
      const notes = (lane.flags || []).map(([at, text]) => `${clock(at)} ${text}`).join("; ");
      const row = el("div", { class: "lane-row" }, el("b", { class: "who", style: { color: hue(i) } }, learner), canvas);
      return [el("div", {}, row, el("p", { class: "lane-note" }, notes)), canvas, lane];
    });
    const syncer = run.syncer && (run.syncer.away.length || run.syncer.lapses.length) ? [syncerRow(run)] : [];
    const stops = run.pauses.map(([at, away]) => el("p", { class: "lane-note" }, `${clock(at)} the run was stopped for ${away} and resumed`));
    node.replaceChildren(...stops, ...syncer.map(([box]) => box), ...made.map(([box]) => box), axisRow(run.seconds));
    for (const [, canvas, lane] of [...syncer, ...made]) watchLane(canvas, lane, run.seconds);
  }

  function watchLane(canvas, lane, seconds) {
    new ResizeObserver(() => drawLane(canvas, lane, seconds)).observe(canvas);
    drawLane(canvas, lane, seconds);
  }

  function syncerRow(run) {
    const canvas = laneCanvas("the syncer");
    const lane = syncerAsLane(run);
    canvas.title = lane.words;
    return [el("div", {}, el("div", { class: "lane-row" }, el("b", { class: "who" }, "syncer"), canvas), el("p", { class: "lane-note" }, lane.words)), canvas, lane];
  }

  function syncerAsLane(run) {
    const { away, lapses } = run.syncer;
    const words = [...away.map(([a, b]) => `no syncer for ${span(b - a)} from ${clock(a)}`), ...lapses.map(([a, , why]) => `${clock(a)} ${why}`)];
    return { stretches: [[0, run.seconds, "serving", 0], ...lapses.map(([a, b]) => [a, b, "stall", 0]), ...away.map(([a, b]) => [a, b, "down", 0])],
      flags: away.map(([a]) => [a, "no syncer"]), words: words.join("; ") };
  }

  function axisRow(seconds) {
    const step = CLOCK_STEPS.find((s) => seconds / s <= 8) || 86400 * Math.ceil(seconds / 86400 / 8);
    const ticks = [];
    for (let s = 0; s <= seconds; s += step) ticks.push(el("span", { style: { left: `${(100 * s) / Math.max(1e-3, seconds)}%` } }, clock(s)));
    return el("div", { class: "lane-row axis" }, el("b", { class: "who" }), el("div", { class: "ticks" }, ...ticks));
  }

  function laneLegend(node) {
    const boxes = LEGEND.map(([name, words]) => el("span", {}, el("i", { style: { background: css(`--${name}`) } }), words));
    node.replaceChildren(...boxes,
      el("span", {}, el("i", { class: "round", style: { background: css("--dot") } }), "merged"),
      el("span", {}, el("i", { class: "round hollow" }), "late, carried on"),
      el("span", {}, el("i", { class: "strip", style: { background: css("--link") } }), "no link"));
  }

  // ---------------------------------------------------------------- bars and tables
  function stack(seconds, whole, skip) {
    const parts = Object.entries(seconds).filter(([name, spent]) => spent > 0 && name !== skip);
    return el("div", { class: "bar" }, ...parts.map(([name, spent]) =>
      el("i", { title: `${name}: ${span(spent)}`, style: { width: `${(100 * spent) / Math.max(1e-9, whole)}%`, background: css(`--${name}`) } })));
  }

  function timePiece(node, run) {
    const rows = run.time.learners.map(([learner, seconds]) => [learner, seconds, Object.values(seconds).reduce((a, b) => a + b, 0)]);
    const all = Object.values(run.time.total).reduce((a, b) => a + b, 0);
    if (rows.length !== 1) rows.unshift(["all", run.time.total, all]);
    node.replaceChildren(...rows.map(([learner, seconds, whole], i) => {
      const rest = Math.max(0, whole - seconds.compute), share = whole > 0 ? `${((100 * seconds.compute) / whole).toFixed(1)}%` : "-";
      return el("div", { class: `bar-row${i === 0 && rows.length > 1 ? " total" : ""}` }, el("b", { class: "who" }, learner), stack(seconds, whole),
        el("span", { class: "figure" }, share), stack(seconds, rest, "compute"), el("span", { class: "figure" }, span(rest)));
    }));
  }

  function timeLegend(node, run) {
    const shown = Object.entries(run.time.total).filter(([, spent]) => spent > 0);
    node.replaceChildren(...shown.map(([name]) => el("span", {}, el("i", { style: { background: css(`--${name}`) } }), `${name}: ${run.meaning[name]}`)));
  }

  function bytesPiece(node, run) {
    const all = [["data-parallel would send", run.bytes.data_parallel, "--idle"], ["Atoll, up", run.bytes.up, "--l0"], ["Atoll, down", run.bytes.down, "--l5"]];
    const top = Math.max(1, ...all.map(([, size]) => size));
    node.replaceChildren(...all.filter(([, size]) => size).map(([name, size, color]) =>
      el("div", { class: "bytes-row" }, el("span", {}, name),
        el("div", { class: "bar" }, el("i", { style: { width: `${Math.max(0.3, (100 * size) / top)}%`, background: css(color) } })),
        el("span", { class: "figure" }, bytes(size)))));
  }

  function table(head, rows, numbers = []) {
    const cells = (tag, values) => el("tr", {}, ...values.map((value, i) => el(tag, { class: numbers.includes(i) ? "number" : undefined }, value)));
    return el("table", {}, el("thead", {}, cells("th", head)), el("tbody", {}, ...rows.map((row) => cells("td", row))));
  }

  function ledgerPiece(node, run) {
    const whole = Math.max(1, run.ledger[0][1]);
    node.replaceChildren(table(["fate", "tokens", "share"],
      run.ledger.map(([name, tokens]) => [name, tokens.toLocaleString("en"), `${((100 * tokens) / whole).toFixed(1)}%`]), [1, 2]));
  }

  const PIECES = {
    "loss-tokens": (node, run) => lossChart(node, run, "tokens"),
    "loss-time": (node, run) => lossChart(node, run, "time"),
    rates: rateChart, commits: commitChart, rho: rhoChart, lanes: lanesPiece, "lane-legend": laneLegend,
    time: timePiece, "time-legend": timeLegend, bytes: bytesPiece, ledger: ledgerPiece,
  };

  // Draw every piece that the page has a place for.
  function render(run, root = document) {
    for (const node of root.querySelectorAll("[data-piece]")) PIECES[node.dataset.piece]?.(node, run);
  }

  return { HUES, render, el, css, hue, chart, table, drawLane, laneCanvas, tipOf, syncerAsLane, axisRow, stack, count, bytes, clock, span, PIECES };
})();
