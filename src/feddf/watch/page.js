"use strict";
// The page over run folders. All text of a run is put into text nodes: names, reasons and metrics are data, never markup.
(() => {
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#a8528c", "#8a6100", "#1f7fb8", "#222222", "#6b6b6b"];
  const DARK = ["#56b4e9", "#ff9a4d", "#3ddbaa", "#e79bc8", "#f0c04a", "#9fd4f5", "#f0f0f0", "#b0b0b0"];
  const DASHES = { fused: [], averaged: [6, 4], ensemble: [2, 3] };
  const MOST_ROUNDS = 60, MOST_CLIENTS = 200, AT_FIRST = 8;
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  let data = { runs: [], problems: [], differs: [] };
  let shown = null; // the paths of the runs that are shown; null until the first data are here
  let charts = [];

  function make(tag, given = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null) element.setAttribute(name, value);
    }
    for (const child of children) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    return element;
  }

  function draw(name, given, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(given)) element.setAttribute(key, value);
    for (const child of children) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    return element;
  }

  const dark = () => root.dataset.theme === "dark";
  const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1));
  const color = (index) => (dark() ? DARK : LIGHT)[index % LIGHT.length];
  const visible = () => data.runs.filter((run) => shown.has(run.path));
  const colorOf = (run) => (shown.has(run.path) ? color(visible().indexOf(run)) : "transparent");

  function swatch(run) {
    const dot = make("span", { class: "swatch", "aria-hidden": "true" });
    dot.style.background = colorOf(run);
    return dot;
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    if (seconds < 90) return `${Math.round(seconds)} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  }

  const last = (values) => (values.length ? values[values.length - 1] : null);

  function mean(run, which) {
    const ends = run.prototypes.map((name) => last(run.series[which][name])).filter((value) => value !== null);
    return ends.length ? ends.reduce((sum, value) => sum + value, 0) / ends.length : null;
  }

  function drawRuns() {
    const head = ["run", "method", "seed", "state", "round", "time left", "averaged %", "fused %", "ensemble %"];
    const rows = data.runs.map((run) => {
      const box = make("input", {
        type: "checkbox", checked: shown.has(run.path), "aria-label": `show ${run.name}`,
        onchange: (event) => {
          if (event.target.checked) shown.add(run.path);
          else shown.delete(run.path);
          redraw();
        },
      });
      const time = run.state === "finished" ? "–" : duration(run.seconds_left);
      return make("tr", {},
        make("td", { class: "text" }, make("label", {}, box, swatch(run), run.name)),
        make("td", { class: "text" }, run.method), make("td", {}, run.seed),
        make("td", { class: `state-${run.state}` }, run.state), make("td", {}, `${run.done}/${run.rounds}`),
        make("td", {}, time), make("td", {}, percent(mean(run, "averaged"))), make("td", {}, percent(mean(run, "fused"))),
        make("td", {}, percent(last(run.ensemble))));
    });
    const titles = head.map((title, i) => make("th", { scope: "col", class: i < 2 ? "text" : "" }, title));
    byId("runs").replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows));
  }

  function lines() {
    return [...document.querySelectorAll('input[name="line"]:checked')].map((box) => box.value);
  }

  function seriesOf(run, which, prototype) {
    const values = which === "ensemble" ? run.ensemble : run.series[which][prototype] || [];
    return values.map((value) => (value === null ? null : 100 * value));
  }

  function drawCharts() {
    for (const chart of charts) chart.destroy();
    charts = [];
    const runs = visible();
    const prototypes = [...new Set(runs.flatMap((run) => run.prototypes))];
    byId("charts").replaceChildren();
    if (!prototypes.length) byId("charts").append(make("p", {}, "No round is finished yet."));
    const figures = prototypes.map((name) => make("figure", {}, make("figcaption", {}, name)));
    byId("charts").append(...figures); // all of them first: the width of each depends on how many there are
    prototypes.forEach((name, i) => drawChart(figures[i], name, runs.filter((run) => run.prototypes.includes(name))));
  }

  function drawChart(figure, prototype, runs) {
    const length = Math.max(...runs.map((run) => run.done));
    const rounds = Array.from({ length }, (_, i) => i + 1);
    const found = [];
    for (const run of runs) {
      for (const which of lines()) {
        const values = seriesOf(run, which, prototype);
        const same = which === "averaged" && values.every((value, i) => value === seriesOf(run, "fused", prototype)[i]);
        if (same && lines().includes("fused")) continue;
        if (values.some((value) => value !== null)) found.push({ run, which, values: rounds.map((_, i) => values[i] ?? null) });
      }
    }
    const legend = make("ul", { class: "legend" });
    const box = make("div", {});
    const ends = found.map((one) => `${one.run.name} ${one.which} ${(last(one.values.filter((v) => v !== null)) ?? 0).toFixed(1)} %`);
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${prototype}: ${ends.join("; ")}`);
    figure.append(box, legend);
    const ink = getComputedStyle(root).getPropertyValue("--faint").trim();
    const grid = { stroke: getComputedStyle(root).getPropertyValue("--line").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const entries = new Map(runs.map((run) => [run, make("li", {}, swatch(run), ` ${run.name}:`)]));
    const items = found.map((one) => {
      const value = make("b", {});
      entries.get(one.run).append(` ${one.which} `, value);
      return value;
    });
    legend.append(...entries.values());
    const say = (index) => items.forEach((item, i) => {
      const value = index === null || index === undefined ? last(found[i].values.filter((v) => v !== null)) : found[i].values[index];
      item.textContent = value === null || value === undefined ? "–" : `${value.toFixed(1)} %`;
    });
    const chart = new uPlot({
      width: Math.max(240, box.clientWidth), height: 260, legend: { show: false }, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
      axes: [
        { ...axis, label: "round", labelFont: axis.font, labelSize: 20, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
        { ...axis, label: "test accuracy in %", labelFont: axis.font, labelSize: 20, size: 44 },
      ],
      series: [{}, ...found.map((one) => ({
        stroke: colorOf(one.run), width: one.which === "fused" ? 2 : 1.3, dash: DASHES[one.which], spanGaps: true,
        points: { show: one.which === "fused" && length < 40, size: 5 },
      }))],
      hooks: { setCursor: [(plot) => say(plot.cursor.idx)] },
    }, [rounds, ...found.map((one) => one.values)], box);
    say(null);
    charts.push(chart);
  }

  function drawKeys() {
    const runs = visible(), every = byId("every-key").checked;
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((name) => {
      const values = new Set(runs.map((run) => run.config[name]));
      return every || (values.size > 1 && !name.startsWith("versions."));
    });
    const head = make("tr", {}, make("th", { class: "text", scope: "col" }, "key"),
      ...runs.map((run) => make("th", { class: "text", scope: "col" }, swatch(run), " ", run.name)));
    const rows = names.map((name) => make("tr", {}, make("th", { class: "text", scope: "row" }, name),
      ...runs.map((run) => make("td", { class: "text" }, run.config[name] ?? "–"))));
    if (!rows.length) rows.push(make("tr", {}, make("td", { class: "text" }, "nothing differs between the runs shown")));
    byId("keys").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  }

  function drawTime() {
    const stages = ["train", "ask", "distill", "fuse", "evaluate"];
    byId("time").replaceChildren(...visible().map((run) => {
      const spent = { ...run.seconds };
      if (spent.fuse) spent.fuse = Math.max(0, spent.fuse - (spent.ask || 0) - (spent.distill || 0));
      const total = stages.reduce((sum, stage) => sum + (spent[stage] || 0), 0);
      const bar = make("div", { class: "bar", "aria-hidden": "true" });
      const words = [];
      stages.forEach((stage, i) => {
        if (!spent[stage] || !total) return;
        const piece = make("span", { title: stage });
        piece.style.width = `${(100 * spent[stage]) / total}%`;
        piece.style.background = color(i);
        bar.append(piece);
        words.push(`${stage === "fuse" ? "rest of fuse" : stage} ${duration(spent[stage])}`);
      });
      return make("div", { class: "timed" }, make("p", {}, swatch(run), ` ${run.name}: ${duration(total)}; `, words.join(", ")), bar);
    }));
  }

  function drawWhich() {
    const before = byId("which").value;
    byId("which").replaceChildren(...visible().map((run) => make("option", { value: run.path }, run.name)));
    if (visible().some((run) => run.path === before)) byId("which").value = before;
  }

  function drawDetails() {
    const run = data.runs.find((one) => one.path === byId("which").value);
    for (const id of ["clients", "dropped", "partition", "clients-note"]) byId(id).replaceChildren();
    if (!run) return;
    const first = Math.max(0, run.happened.length - MOST_ROUNDS);
    const rounds = run.happened.slice(first);
    const everyone = [...new Set(rounds.flatMap((one) => [...one.clients, ...one.dropped.map((lost) => lost.client)]))].sort();
    const clients = everyone.slice(0, MOST_CLIENTS);
    const logged = rounds.some((one) => Object.keys(one.accuracies).length);
    byId("clients-note").textContent = (logged ? "a number is the client's own test accuracy in %" : "● took part")
      + "; ✕ dropped or refused; ○ left out by drop-worst"
      + (first ? `; the last ${MOST_ROUNDS} rounds` : "")
      + (everyone.length > clients.length ? `; ${MOST_CLIENTS} of ${everyone.length} clients` : "");
    const head = make("tr", {}, make("th", { class: "text", scope: "col" }, "client"),
      ...rounds.map((_, i) => make("th", { scope: "col" }, first + i + 1)));
    const body = clients.map((name) => make("tr", {}, make("th", { class: "text", scope: "row" }, name), ...rounds.map((one) => {
      const lost = one.dropped.find((each) => each.client === name);
      if (lost && !one.clients.includes(name)) return make("td", { class: "lost", title: lost.reason }, "✕");
      if (!one.clients.includes(name)) return make("td", {}, "");
      const worst = one.worst.includes(name), accuracy = one.accuracies[name];
      const text = accuracy === undefined || accuracy === null ? (worst ? "○" : "●") : Math.round(100 * accuracy);
      return make("td", { class: worst ? "worst" : "sampled" }, text);
    })));
    byId("clients").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
    const lost = run.happened.flatMap((one, i) => one.dropped.map((each) => ({ round: i + 1, ...each }))).slice(-200).reverse();
    const titles = ["round", "client", "reason"].map((title) => make("th", { class: "text", scope: "col" }, title));
    const rows = lost.map((one) => make("tr", {}, make("td", {}, one.round), make("td", { class: "text" }, one.client),
      make("td", { class: "text" }, one.reason)));
    if (!rows.length) rows.push(make("tr", {}, make("td", { class: "text", colspan: 3 }, "nobody")));
    byId("dropped").replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows));
    drawPartition(run.partition);
  }

  function drawPartition(partition) {
    if (!partition || !partition.counts.length) {
      byId("partition").append(make("p", {}, "The run did not write it down."));
      return;
    }
    const counts = partition.counts.slice(0, MOST_CLIENTS), classes = counts[0].length;
    const most = Math.max(1, ...counts.flat()), cell = classes > 40 ? 10 : 20;
    const left = 16 + 7 * Math.max(3, ...partition.classes.map((name) => name.length));
    const svg = draw("svg", { width: Math.max(left + 300, left + counts.length * cell + 10), height: classes * cell + 44, role: "img",
      "aria-label": `${counts.length} clients, ${classes} classes; the largest dot is ${most} examples` });
    counts.forEach((row, client) => {
      const x = left + (client + 0.5) * cell;
      if (client % Math.ceil(counts.length / 40) === 0) svg.append(draw("text", { x, y: classes * cell + 16, "text-anchor": "middle" }, client));
      row.forEach((count, label) => {
        if (!count) return;
        const y = (classes - label - 0.5) * cell;
        svg.append(draw("circle", { cx: x, cy: y, r: 0.47 * cell * Math.sqrt(count / most) }, draw("title", {}, `client ${client}, class ${partition.classes[label] ?? label}: ${count}`)));
      });
    });
    for (let label = 0; label < classes; label += Math.ceil(classes / 40)) {
      svg.append(draw("text", { x: left - 6, y: (classes - label - 0.5) * cell + 4, "text-anchor": "end" }, partition.classes[label] ?? label));
    }
    svg.append(draw("text", { x: left, y: classes * cell + 36 }, `client; area: number of examples, the largest ${most}`));
    byId("partition").append(svg);
  }

  function drawProblems() {
    byId("problems").hidden = !data.problems.length;
    byId("problems").querySelector("ul").replaceChildren(
      ...data.problems.map((one) => make("li", {}, `${one.path}: ${one.reason}`)));
  }

  function drawShown() {
    drawCharts();
    drawKeys();
    drawTime();
    drawWhich();
    drawDetails();
  }

  function redraw() { // all, and the focus stays on the box that had it
    const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    drawRuns();
    drawShown();
    if (focused) [...document.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused)?.focus();
  }

  function update(found) {
    const known = new Set(data.runs.map((run) => run.path));
    const added = found.runs.filter((run) => !known.has(run.path));
    data = found;
    if (shown === null) {
      const newest = [...found.runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, AT_FIRST);
      shown = new Set(newest.map((run) => run.path));
    } else {
      for (const run of added) shown.add(run.path); // a run that begins while one looks
    }
    drawProblems();
    redraw();
  }

  const clock = () => new Date().toLocaleTimeString();

  function state() {
    const running = data.runs.filter((run) => run.state === "running").length;
    return `${data.runs.length} ${data.runs.length === 1 ? "run" : "runs"}, ${running} in progress`;
  }

  async function follow() {
    let tag = "";
    for (;;) {
      try {
        const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag") || "";
          update(await answer.json());
        }
        byId("status").textContent = `${state()}; followed live`;
      } catch {
        byId("status").textContent = `${state()}; feddf watch has ended, this is the state of ${clock()}`;
        return;
      }
      await new Promise((resume) => setTimeout(resume, 2000));
    }
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    if (shown !== null) redraw();
  }

  const prefers = matchMedia("(prefers-color-scheme: dark)");
  setTheme(prefers.matches ? "dark" : "light");
  prefers.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  const turn = () => setTheme(dark() ? "light" : "dark");
  byId("theme").addEventListener("click", turn);
  document.addEventListener("keydown", (event) => {
    if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.tagName !== "SELECT") turn();
  });
  byId("all").addEventListener("click", () => { shown = new Set(data.runs.map((run) => run.path)); redraw(); });
  byId("none").addEventListener("click", () => { shown = new Set(); redraw(); });
  byId("every-key").addEventListener("change", drawKeys);
  byId("which").addEventListener("change", drawDetails);
  for (const box of document.querySelectorAll('input[name="line"]')) box.addEventListener("change", drawCharts);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width && shown !== null) { width = innerWidth; drawCharts(); } });

  const text = byId("data").textContent;
  if (text) {
    update(JSON.parse(text));
    byId("status").textContent = `${state()}; a report, as of ${new Date(1000 * Math.max(0, ...data.runs.map((run) => run.updated ?? 0))).toLocaleString()}`;
  } else {
    byId("status").textContent = "loading";
    follow();
  }
})();
