// The live page: one stream of ticks for the rows and the log, the whole picture every few seconds, lanes for what is in sight.
(() => {
  "use strict";
  const { el, clock, count, bytes, span } = Atoll, $ = (id) => document.getElementById(id);
  const NAMES = ["learner", "state", "step", "tokens_s", "loss", "behind", "restarts", "up", "down", "doing"];
  const TROUBLE = ["lost", "down", "away", "cut off", "restarting", "joining", "set aside", "slow", "training", "left"];
  const WHOLE_MS = 5000, LANES_MS = 4000, LOG_MAX = 400, SPARE_ROWS = 4, LANES_MAX = 80;
  const S = { run: "", whole: null, rows: new Map(), lanes: new Map(), places: {}, sites: {}, log: [], hidden: new Set(), closed: new Set(), actions: [], stream: null, at: 0, elapsed: 0, over: false };
  const phone = matchMedia("(max-width: 720px)");

  const get = async (path) => {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };
  const api = (what) => `/api/run/${encodeURIComponent(S.run)}/${what}`;
  const object = (row) => Object.fromEntries(NAMES.map((name, i) => [name, row[i]]));

  // ---------------------------------------------------------------- taking in
  async function fetchWhole() {
    const run = S.run;
    const whole = await get(api("whole")).catch(() => null);
    if (!whole || run !== S.run) return;
    S.whole = whole;
    S.places = whole.places;
    S.sites = whole.sites;
    S.rows = new Map(whole.rows.map((row) => [row[0], object(row)]));
    if (!S.log.length || whole.log_count < S.logCount) S.log = whole.log;
    S.logCount = Math.max(S.logCount || 0, whole.log_count);
    showWhole();
  }

  function tick(data) {
    for (const row of data.rows) S.rows.set(row[0], object(row));
    if (data.log.length && S.logCount !== undefined && data.log_count > S.logCount) {
      S.log = S.log.concat(data.log.slice(-(data.log_count - S.logCount))).slice(-LOG_MAX);
      S.logCount = data.log_count;
      showLog();
    }
    showHead(data.head);
    showRows();
    extendLanes(data.head.elapsed_s);
  }

  function follow() {
    S.stream?.close();
    S.stream = new EventSource(api("stream"));
    S.stream.addEventListener("tick", (event) => tick(JSON.parse(event.data)));
    S.stream.onopen = () => { fetchWhole().then(() => pill("link", S.over ? "connected" : "live", S.over ? "" : "good")); };
    S.stream.onerror = () => pill("link", S.over ? "the page's server has ended" : "page's server away, trying again", S.over ? "" : "warn");
  }

  async function fetchLanes() {
    const wanted = visible().filter((name) => name).slice(0, LANES_MAX);
    if (!wanted.length || document.hidden) return;
    const answer = await get(api(`lanes?${new URLSearchParams(wanted.map((name) => ["learner", name]))}`)).catch(() => null);
    for (const [name, lane] of Object.entries(answer?.lanes || {})) S.lanes.set(name, lane);
    if (S.lanes.size > 500) S.lanes = new Map([...S.lanes].slice(-200));
    drawLanes();
  }

  // Between two answers a lane goes on with what its learner is doing now.
  function extendLanes(elapsed) {
    for (const [name, lane] of S.lanes) {
      const row = S.rows.get(name), last = lane.stretches.at(-1);
      if (!row?.doing || S.over) continue;
      if (last && last[2] === row.doing) last[1] = Math.max(last[1], elapsed);
      else if (last && elapsed - last[1] > 0.05) lane.stretches.push([last[1], elapsed, row.doing, 0]);
    }
    drawLanes();
  }

  // ---------------------------------------------------------------- showing
  function pill(id, text, tone) { const node = $(id); node.textContent = text; node.className = `pill ${tone}`; }

  function showHead(head) {
    S.over = Boolean(head.over);
    S.elapsed = head.elapsed_s;
    $("title").textContent = head.title || S.run;
    document.title = `${head.title || S.run} · Atoll`;
    const rate = head.tokens_s ? ` · ${count(head.tokens_s)} tok/s` : "";
    $("clock").textContent = head.begun ? `${clock(head.elapsed_s)} · ${count(head.tokens)}${head.budget ? ` of ${count(head.budget)}` : ""} tokens${rate}` : "starting";
    $("progress").style.width = head.budget ? `${Math.min(100, (100 * head.tokens) / head.budget)}%` : "0";
    const tones = { up: "good", down: "bad", silent: "warn", stopped: "" };
    const words = { up: `syncer up, epoch ${head.epoch}`, down: "syncer down, learners train on", silent: "syncer silent", stopped: "syncer stopped" };
    $("report").hidden = !head.over;
    $("report").href = api("report");
    if (head.over) pill("syncer", `run over: ${head.over}`, "");
    else pill("syncer", words[head.syncer] || "no syncer", tones[head.syncer] || "");
    const alerts = [head.trouble, head.lapse && `durability ${head.durability}: ${head.lapse}`, head.waits_for && `waits for learners: ${head.joined} of ${head.waits_for} joined`];
    $("alerts").replaceChildren(...alerts.filter(Boolean).map((text) => el("p", {}, text)));
  }

  function showWhole() {
    const run = S.whole;
    showHead(run.head);
    $("tiles").replaceChildren(...run.tiles.map(([value, name]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
    Atoll.render(run);
    $("goodput").textContent = `goodput ${(100 * run.time.share).toFixed(1)}%`;
    showRounds(run);
    showVersions(run);
    showDecisions(run);
    showData(run);
    showParts(run);
    showLog();
    showRows();
    showSyncer(run);
  }

  function showRounds(run) {
    $("rounds-note").textContent = Object.entries(run.closed).map(([why, times]) => `${times.toLocaleString("en")} closed: ${why}`).join(", ");
    const rows = run.rounds.map((one) => {
      const more = one.merged_count - one.merged.length;
      const who = one.merged.join(", ") + (more > 0 ? ` and ${more} more` : "");
      return [clock(one.at), String(one.fragment), String(one.version), `${one.merged_count}${one.asked ? ` of ${one.asked}` : ""}${one.carried ? `, ${one.carried} carried` : ""}`, who, one.late.join(", "), one.closed_ms ? `${one.closed_ms} ms` : "-"];
    });
    $("rounds").replaceChildren(rows.length ? Atoll.table(["at", "fragment", "version", "merged", "who", "not in time", "closed in"], rows, [1, 2, 6]) : el("p", { class: "empty" }, "no round has closed yet"));
  }

  function showVersions(run) {
    const ages = run.versions.map(([, , age]) => age).sort((a, b) => a - b), usual = ages[Math.floor(ages.length / 2)] || 0;
    $("versions").replaceChildren(...(run.versions.length ? run.versions.map(([fragment, version, age]) =>
      el("div", { class: age > 4 * usual + 5 ? "old" : undefined, title: `fragment ${fragment}: version ${version}, ${span(age)} old` }, `v${version}`, el("small", {}, `#${fragment} ${span(age)}`)))
      : [el("p", { class: "empty" }, "no version yet")]));
  }

  function showDecisions(run) {
    const entries = run.decisions.map(([at, what, why]) => el("p", {}, `${clock(at)}  ${what}`, el("small", {}, why)));
    $("decisions").replaceChildren(...(entries.length ? entries : [el("p", { class: "empty" }, "nothing out of the ordinary was decided")]));
  }

  function showData(run) {
    if (!run.data.length) return $("data").replaceChildren();
    const rows = run.data.map((one) => [one.stream, one.chunks ? `${one.done} of ${one.chunks}` : String(one.done), String(one.in_hand), String(one.pool), String(one.reissued), String(one.repeated)]);
    $("data").replaceChildren(el("h3", {}, "Data leases"), Atoll.table(["stream", "chunks done", "in hand", "handed back", "issued again", "done twice"], rows, [1, 2, 3, 4, 5]));
  }

  function showParts(run) {
    $("parts-card").hidden = !run.parts.length;
    $("parts").replaceChildren(Atoll.table(["part", "where", "what it has", "state"], run.parts, []));
    for (const cell of document.querySelectorAll("#parts td:last-child")) cell.className = cell.textContent.startsWith("away") ? "bad" : "good";
  }

  function showLog() {
    $("log").replaceChildren(...S.log.slice(-150).reverse().map(([at, text, tone]) => el("li", { class: tone }, el("time", {}, clock(at)), text)));
  }

  function showSyncer(run) {
    if (!run.syncer.away.length && !run.syncer.lapses.length) return $("syncer-row").replaceChildren();
    const canvas = Atoll.laneCanvas("the syncer"), lane = Atoll.syncerAsLane(run);
    canvas.title = lane.words;
    const cells = Array.from({ length: 6 }, () => el("span", { class: "n" }));
    $("syncer-row").replaceChildren(el("div", { class: "row" }, el("span", { class: "name" }, "syncer"), el("span", { class: "state" }, `epoch ${run.head.epoch}`), ...cells, canvas));
    Atoll.drawLane(canvas, lane, run.seconds);
  }

  // ---------------------------------------------------------------- rows: only what is in sight is in the document
  const island = (name) => name.replace(/[-_./]?\d+$/, "") || name;
  const host = (name) => S.places[name] || "";
  const groupOf = { host: (row) => host(row.learner) || "host unknown", island: (row) => island(row.learner), site: (row) => S.sites[row.learner] || "site unknown" };
  const collator = new Intl.Collator("en", { numeric: true });
  const orders = {
    learner: () => 0, trouble: (a, b) => TROUBLE.indexOf(a.state) - TROUBLE.indexOf(b.state), tokens_s: (a, b) => a.tokens_s - b.tokens_s,
    loss: (a, b) => (b.loss ?? -1) - (a.loss ?? -1), behind: (a, b) => b.behind - a.behind, restarts: (a, b) => b.restarts - a.restarts, up: (a, b) => b.up + b.down - a.up - a.down,
  };

  function chosen() {
    const text = $("filter").value.trim().toLowerCase(), order = orders[$("sort").value];
    const found = [...S.rows.values()].filter((row) => !S.hidden.has(row.state) && (!text || row.learner.toLowerCase().includes(text) || host(row.learner).includes(text) || (S.sites[row.learner] || "").toLowerCase().includes(text)));
    return found.sort((a, b) => order(a, b) || collator.compare(a.learner, b.learner));
  }

  // What the list holds, in order: rows of learners, and lines that fold a group.
  function listed() {
    const by = groupOf[$("group").value], rows = chosen();
    if (!by) return rows;
    const groups = new Map();
    for (const row of rows) groups.set(by(row), [...(groups.get(by(row)) || []), row]);
    return [...groups].sort((a, b) => collator.compare(a[0], b[0])).flatMap(([name, members]) => [{ fold: name, members }, ...(S.closed.has(name) ? [] : members)]);
  }

  let list = [], made = new Map();
  const rowHeight = () => (phone.matches ? 56 : 34);

  function window_() {
    const box = $("rows"), high = rowHeight(), first = Math.max(0, Math.floor(box.scrollTop / high) - SPARE_ROWS);
    return [first, Math.min(list.length, first + Math.ceil(box.clientHeight / high) + 2 * SPARE_ROWS)];
  }
  const visible = () => { const [first, last] = window_(); return list.slice(first, last).map((row) => row.learner); };

  function showRows() {
    list = listed();
    const high = rowHeight(), counts = new Map();
    for (const row of S.rows.values()) counts.set(row.state, (counts.get(row.state) || 0) + 1);
    $("counts").textContent = `${S.rows.size.toLocaleString("en")}, ${chosen().length.toLocaleString("en")} shown`;
    showChips(counts);
    $("rows-inside").style.height = `${list.length * high}px`;
    $("rows").style.height = `${Math.min(list.length * high + 2, phone.matches ? 560 : 760)}px`;
    const [first, last] = window_(), keep = new Map();
    for (let i = first; i < last; i += 1) {
      const row = list[i], key = row.fold !== undefined ? `fold ${row.fold}` : `row ${row.learner}`;
      const node = made.get(key) || (row.fold !== undefined ? makeFold(row) : makeRow(row.learner));
      row.fold !== undefined ? fillFold(node, row) : fillRow(node, row);
      node.style.top = `${i * high}px`;
      keep.set(key, node);
      if (!node.isConnected) $("rows-inside").append(node);
    }
    for (const [key, node] of made) if (!keep.has(key)) node.remove();
    made = keep;
    $("lane-axis").replaceChildren(Atoll.axisRow(seconds()));
    if (visible().some((name) => name && !S.lanes.has(name))) soonLanes();
  }

  function makeRow(learner) {
    const cell = (css) => el("span", { class: css });
    const node = el("div", { class: "row", "data-learner": learner });
    node.parts = { name: cell("name"), state: cell("state"), step: cell("n"), rate: cell("n rate"), loss: cell("n"), behind: cell("n"), restarts: cell("n"), bytes: cell("n bytes"), lane: Atoll.laneCanvas(`what ${learner} was doing`) };
    node.parts.link = el("a", { href: api(`log/${encodeURIComponent(learner)}`), target: "_blank", rel: "noopener", title: "its log" }, learner);
    node.parts.host = cell("host");
    node.parts.name.append(node.parts.link, node.parts.host);
    node.parts.lane.addEventListener("mousemove", (event) => {
      node.parts.lane.title = Atoll.tipOf(S.lanes.get(learner) || {}, (event.offsetX / node.parts.lane.clientWidth) * seconds(), S.whole?.meaning || {});
    });
    const { name, state, step, rate, loss, behind, restarts, bytes: size, lane } = node.parts;
    node.append(name, state, step, rate, loss, behind, restarts, size, lane);
    if (S.actions.length) node.append(el("span", { class: "acts" }, ...[["drain", ""], ["kill", "bad"]].filter(([action]) => S.actions.includes(action)).map(([action, css]) => el("button", { class: css, onclick: () => act(action, learner) }, action))));
    return node;
  }

  function fillRow(node, row) {
    const { parts } = node, set = (part, text) => { if (part.textContent !== text) part.textContent = text; };
    set(parts.state, row.state);
    parts.state.className = `state ${row.state.replaceAll(" ", "-")}`;
    set(parts.step, row.step.toLocaleString("en"));
    set(parts.rate, row.tokens_s && row.doing && row.doing !== "down" ? count(row.tokens_s) : "-");
    set(parts.loss, row.loss === null ? "-" : row.loss.toFixed(3));
    set(parts.behind, row.behind ? String(row.behind) : "0");
    set(parts.restarts, String(row.restarts));
    set(parts.bytes, row.up || row.down ? `${bytes(row.up)} / ${bytes(row.down)}` : "-");
    set(parts.host, host(row.learner));
    parts.name.style.borderLeftColor = hueOf(row.learner);
    draw(node, row.learner);
  }

  function makeFold(row) {
    const node = el("div", { class: "row fold" }, el("span", { class: "name" }), el("span", { class: "summary" }));
    node.addEventListener("click", () => { S.closed.has(row.fold) ? S.closed.delete(row.fold) : S.closed.add(row.fold); showRows(); });
    return node;
  }

  function fillFold(node, row) {
    const states = new Map(), rate = row.members.reduce((sum, one) => sum + one.tokens_s, 0);
    for (const one of row.members) states.set(one.state, (states.get(one.state) || 0) + 1);
    node.children[0].textContent = `${S.closed.has(row.fold) ? "▸" : "▾"} ${row.fold}`;
    node.children[1].textContent = `${[...states].map(([state, times]) => `${times} ${state}`).join(", ")} · ${count(rate)} tok/s`;
  }

  // The colour of its curves, where they can be told apart.
  function hueOf(learner) {
    const drawn = (S.whole?.loss.trains || []).map((one) => one.learner), i = drawn.indexOf(learner);
    return i >= 0 && drawn.length <= Atoll.HUES ? Atoll.hue(i) : "transparent";
  }

  const seconds = () => Math.max(S.whole?.seconds || 0, S.elapsed, 1);
  const draw = (node, learner) => { if (S.lanes.has(learner)) Atoll.drawLane(node.parts.lane, S.lanes.get(learner), seconds()); };
  function drawLanes() { for (const node of made.values()) if (node.dataset.learner !== undefined) draw(node, node.dataset.learner); }

  function showChips(counts) {
    const known = [...counts].sort((a, b) => TROUBLE.indexOf(b[0]) - TROUBLE.indexOf(a[0])), text = JSON.stringify([known, [...S.hidden]]);
    if ($("chips").dataset.text === text) return;
    $("chips").dataset.text = text;
    $("chips").replaceChildren(...known.map(([state, times]) => el("button", {
      class: S.hidden.has(state) ? "" : "on", "data-state": state, "aria-pressed": String(!S.hidden.has(state)),
      onclick: () => { S.hidden.has(state) ? S.hidden.delete(state) : S.hidden.add(state); showRows(); },
    }, `${state} ${times}`)));
  }

  let lanesTimer = 0;
  function soonLanes() { if (!lanesTimer) lanesTimer = setTimeout(() => { lanesTimer = 0; fetchLanes(); }, 120); }

  // ---------------------------------------------------------------- control
  const SURE = { drain: (l) => `${l} hands over its progress and leaves. The others go on without it.`, kill: (l) => `${l} is killed with SIGKILL, for a drill. Its launcher starts it again.`,
    add: () => "One more learner is started on the machine of this page.", stop: () => "Every learner hands over and leaves; the run stops. `atoll resume` goes on with it.",
    snapshot: () => "The syncer writes the whole run down, as it is now. Training goes on." };

  function act(action, learner = "") {
    $("sure-text").textContent = SURE[action](learner);
    const dialog = $("sure");
    dialog.onclose = async () => {
      if (dialog.returnValue !== "yes") return;
      const answer = await fetch(api("control"), { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ action, learner }) });
      const said = await answer.json().catch(() => ({ error: "the page's server did not answer" }));
      S.log = S.log.concat([[S.elapsed, said.said || said.error, said.error ? "bad" : "good"]]);
      showLog();
    };
    dialog.returnValue = "";
    dialog.showModal();
  }

  // ---------------------------------------------------------------- runs side by side
  async function compare(names) {
    const runs = await get(`/api/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
    for (const x of ["tokens", "time"]) {
      Atoll.chart($(`compare-${x}`), runs.map((run, i) => ({ label: run.name, color: Atoll.hue(i), width: 2, data: run.loss[x] })), { x, legend: true, range: spanOf(runs) });
    }
    // Runs have different figures (one without a published loss, say): each goes under its own name.
    const names_ = [...new Set(runs.flatMap((run) => run.tiles.map(([, name]) => name)))], heads = ["run", ...names_];
    const figures = (run) => { const by = new Map(run.tiles.map(([value, name]) => [name, value])); return names_.map((name) => by.get(name) ?? "-"); };
    $("compare-table").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((h) => el("th", {}, h)))), el("tbody", {}, ...runs.map((run, i) =>
      el("tr", {}, el("td", {}, el("i", { style: { background: Atoll.hue(i) } }), el("a", { href: `?run=${encodeURIComponent(run.name)}` }, run.name)), ...figures(run).map((value) => el("td", {}, value)))))));
  }
  function spanOf(runs) {
    const found = runs.filter((run) => run.loss.tokens[0].length).map((run) => run.loss.range);
    return found.length ? [Math.min(...found.map((r) => r[0])), Math.max(...found.map((r) => r[1]))] : [0, 1];
  }

  function showCompare(names) {
    const picked = new Set(names.slice(0, 4));
    $("compare").hidden = false;
    const again = () => {
      $("compare-choice").replaceChildren(...names.map((name) => el("button", { class: picked.has(name) ? "on" : "",
        onclick: () => { picked.has(name) ? picked.delete(name) : picked.add(name); again(); } }, name)));
      compare([...picked].slice(0, 8));
    };
    again();
    setInterval(() => compare([...picked].slice(0, 8)), 10000);
  }

  // ---------------------------------------------------------------- begin
  async function begin() {
    const { runs, control } = await get("/api/runs");
    S.actions = control;
    for (const action of ["add", "snapshot", "stop"]) {
      $(action).hidden = !control.includes(action);
      $(action).onclick = () => act(action);
    }
    $("reach").hidden = !control.length;
    $("reach").textContent = control.includes("kill") ? "add, kill and stop act on the machine that this page runs on" : "only what the syncer can do: add, kill and stop learners where they run";
    const wanted = new URLSearchParams(location.search).get("run");
    S.run = runs.includes(wanted) ? wanted : runs[0] || "";
    if (runs.length > 1) {
      $("run-choice").hidden = false;
      $("run-choice").append(el("option", { value: "" }, "all runs, side by side"), ...runs.map((name) => el("option", { value: name, selected: name === wanted }, name)));
      $("run-choice").onchange = (event) => { location.search = event.target.value ? `?run=${encodeURIComponent(event.target.value)}` : ""; };
      if (!wanted) { $("one-run").hidden = true; pill("link", "", ""); $("link").hidden = $("syncer").hidden = true; return showCompare(runs); }
    }
    for (const id of ["filter", "sort", "group"]) $(id).addEventListener("input", () => { $("rows").scrollTop = 0; showRows(); });
    $("rows").addEventListener("scroll", () => showRows());
    for (const button of document.querySelectorAll(".switch button")) button.onclick = () => {
      for (const one of document.querySelectorAll(".switch button")) one.classList.toggle("on", one === button);
      $("loss").dataset.piece = `loss-${button.dataset.x}`;
      if (S.whole) Atoll.render(S.whole);
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => S.whole && showWhole());
    phone.addEventListener("change", showRows);
    addEventListener("resize", drawLanes);
    follow();
    setInterval(() => { if (!document.hidden) fetchWhole(); }, WHOLE_MS);
    setInterval(fetchLanes, LANES_MS);
  }
  begin();
})();
