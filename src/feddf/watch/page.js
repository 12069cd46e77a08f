"use strict";
// The page over run folders. All text of a run is put into text nodes: names, reasons and metrics are data, never markup.
(() => {
  const STAGES = { train: "#7d8a99", ask: "#b8a24a", distill: "#8f6bb3", fuse: "#a9755b", evaluate: "#5f9ea0" };
  const DASHES = { fused: [], averaged: [6, 4], ensemble: [2, 3] };
  const MOST_ROUNDS = 60, MOST_CLIENTS = 200, MOST_CLASSES = 30, AT_FIRST = 24;
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  let data = { runs: [], groups: [], problems: [], colors: {} };
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
  const known = (value) => value !== null && value !== undefined;
  const percent = (value) => (known(value) ? (100 * value).toFixed(1) : "–");
  const last = (values) => (values.length ? values[values.length - 1] : null);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const visible = () => data.runs.filter((run) => shown.has(run.path));
  const colorOf = (method) => data.colors[method][dark() ? 1 : 0];
  const scoreOf = (run) => data.groups.find((group) => group.paths.includes(run.path)).score;
  const named = (runs) => [...new Set(runs.flatMap((run) => run.prototypes))];

  function deviation(values) { // of a sample (n − 1)
    const middle = mean(values);
    return values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1)) : 0;
  }

  function swatch(color) {
    const dot = make("span", { class: "swatch", "aria-hidden": "true" });
    dot.style.background = color;
    return dot;
  }

  function duration(seconds) {
    if (!known(seconds)) return "–";
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    if (seconds < 90) return `${Math.round(seconds)} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  }

  function fill(id, head, rows) {
    byId(id).replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  }

  function drawHeadlines() {
    const labels = data.groups.map((group) => group.label);
    const one = data.groups.length === 1;
    const title = one ? `${labels[0]}: ${data.groups[0].about}` : labels.slice(0, 3).join(", ") + (labels.length > 3 ? ` and ${labels.length - 3} more` : "");
    byId("title").textContent = title || "feddf runs";
    document.title = title ? `${title} · feddf` : "feddf runs";
    byId("headlines").className = one ? "" : "several";
    byId("headlines").replaceChildren(...data.groups.slice(0, 12).flatMap((group) => {
      const gain = group.headline.match(/^(.*? [+-][\d.]+(?: ± [\d.]+)?)(.*)$/);
      const said = gain ? [make("b", {}, gain[1]), gain[2]] : [group.headline];
      return [make("p", { class: "headline" }, ...said), ...(one ? [] : [make("p", { class: "note" }, `${group.label}: ${group.about}`)])];
    }));
  }

  const ends = (run, which) => run.prototypes.map((name) => last(run.series[which][name])).filter(known);

  function drawRuns() {
    // a column for each model of one experiment; several experiments have different models, and perhaps different scores
    const one = data.groups.length === 1, several = one && named(data.runs).length > 1 ? named(data.runs) : [];
    const scores = new Set(data.groups.map((group) => group.score)).size > 1;
    const each = (run) => run.prototypes.map((name) => `${name} ${percent(last(run.series.fused[name]))}`).join(", ");
    const head = ["run", "method", "seed", "state", "round", "time left", ...(scores ? ["score"] : []), "averaged %", "fused %",
      ...several.map((name) => `${name} %`), "ensemble %", ...(one ? [] : ["each model, fused %"])];
    const rows = data.runs.map((run) => {
      const box = make("input", {
        type: "checkbox", checked: shown.has(run.path), "aria-label": `show ${run.name}`,
        onchange: (event) => {
          if (event.target.checked) shown.add(run.path);
          else shown.delete(run.path);
          redraw();
        },
      });
      const cells = [run.method, run.seed, run.state, `${run.done}/${run.rounds}`, run.state === "finished" ? "–" : duration(run.seconds_left),
        ...(scores ? [scoreOf(run)] : []), percent(mean(ends(run, "averaged"))), percent(mean(ends(run, "fused"))),
        ...several.map((name) => percent(last(run.series.fused[name] ?? []))), percent(last(run.ensemble)), ...(one ? [] : [each(run)])];
      const text = (i) => i === 0 || (!one && i === cells.length - 1);
      return make("tr", {}, make("td", { class: "text" }, make("label", {}, box, swatch(colorOf(run.method)), run.name)),
        ...cells.map((cell, i) => make("td", { "data-label": head[i + 1], class: text(i) ? "text" : i === 2 ? `state-${run.state}` : "" }, cell)));
    });
    fill("runs", head.map((title, i) => make("th", { scope: "col", class: i < 2 || title.startsWith("each") ? "text" : "" }, title)), rows);
  }

  const lines = () => [...document.querySelectorAll('input[name="line"]:checked')].map((box) => box.value);

  function seriesOf(run, which, prototype) {
    const values = which === "ensemble" ? run.ensemble : run.series[which][prototype] || [];
    return values.map((value) => (value === null ? null : 100 * value));
  }

  function onePerSeed(runs) { // a seed that was run twice counts once, as far as it got
    const found = new Map();
    for (const run of runs) if (run.done > (found.get(run.seed)?.done ?? -1)) found.set(run.seed, run);
    return [...found.values()];
  }

  // The curves of one panel: for each method and kind of line the mean over its seeds, with a band of ± one deviation.
  function curvesOf(runs, prototype) {
    const rounds = Math.max(...runs.map((run) => run.done)), each = document.querySelector('input[name="each"]').checked;
    const found = [];
    for (const method of new Set(runs.map((run) => run.method))) {
      const mine = onePerSeed(runs.filter((run) => run.method === method));
      for (const which of lines()) {
        const all = mine.map((run) => seriesOf(run, which, prototype));
        const fused = mine.map((run) => seriesOf(run, "fused", prototype));
        if (which === "averaged" && lines().includes("fused") && String(all) === String(fused)) continue;
        const at = Array.from({ length: rounds }, (_, i) => all.map((values) => values[i]).filter(known));
        const values = at.map(mean), spread = at.map(deviation);
        if (!values.some(known)) continue;
        const band = which === "fused" && mine.length > 1 && !each;
        const edge = (sign) => values.map((value, i) => (known(value) ? Math.min(100, Math.max(Math.min(0, value), value + sign * spread[i])) : null));
        found.push({ method, which, values, spread, band: band ? [edge(1), edge(-1)] : [],
          seeds: each && mine.length > 1 ? all.map((one) => values.map((_, i) => one[i] ?? null)) : [] });
      }
    }
    return found;
  }

  function drawCharts() {
    for (const chart of charts) chart.destroy();
    charts = [];
    const scores = [...new Set(visible().map(scoreOf))];
    byId("curves-title").textContent = `Test ${scores.length === 1 ? scores[0] : "scores"} by round`;
    const panels = data.groups.flatMap((group) => {
      const runs = visible().filter((run) => group.paths.includes(run.path));
      return named(runs).map((name) => {
        const mine = runs.filter((run) => run.prototypes.includes(name));
        const title = data.groups.length > 1 ? `${group.label}: ${name}` : name;
        return { title, score: group.score, curves: curvesOf(mine, name), rounds: Math.max(...mine.map((run) => run.done)) };
      });
    });
    const ranges = new Map(scores.map((score) => { // one axis for all panels of a score
      const curves = panels.filter((panel) => panel.score === score).flatMap((panel) => panel.curves);
      const values = curves.flatMap((one) => [one.values, ...one.band, ...one.seeds].flat()).filter(known);
      const low = values.reduce((a, b) => Math.min(a, b), 100), high = values.reduce((a, b) => Math.max(a, b), 0);
      return [score, [10 * Math.floor(low / 10), Math.min(100, Math.max(10, 10 * Math.ceil(high / 10)))]];
    }));
    byId("band").textContent = panels.some((panel) => panel.curves.some((one) => one.band.length)) ? "mean over the seeds that have done the round; band: ± one standard deviation" : "";
    const figures = panels.map((panel) => make("figure", {}, make("figcaption", {}, panel.title)));
    byId("charts").replaceChildren(...figures); // all of them first: the width of each depends on how many there are
    if (!panels.length) byId("charts").append(make("p", {}, "No round is finished yet."));
    panels.forEach((panel, i) => drawChart(figures[i], panel, ranges.get(panel.score)));
  }

  function drawChart(figure, { title, score, curves, rounds }, range) {
    const x = Array.from({ length: rounds }, (_, i) => i + 1);
    const box = make("div", { role: "img" }), legend = make("ul", { class: "legend" });
    figure.append(box, legend);
    const shownRound = (one, index) => (known(index) ? index : one.values.findLastIndex(known));
    const heads = new Map(curves.map((one) => [one.method, make("span", {})]));
    const entries = new Map([...heads].map(([method, head]) => [method, make("li", {}, swatch(colorOf(method)), " ", head)]));
    const items = curves.map((one) => {
      const value = make("b", {});
      entries.get(one.method).append(` ${one.which} `, value);
      return value;
    });
    legend.append(...entries.values());
    const text = (one, index) => {
      const place = shownRound(one, index);
      if (!known(one.values[place])) return "–";
      return one.values[place].toFixed(1) + (one.band.length ? ` ± ${one.spread[place].toFixed(1)}` : "") + " %";
    };
    const say = (index) => items.forEach((item, i) => {
      item.textContent = text(curves[i], index);
      if (curves[i].which === lines()[0]) heads.get(curves[i].method).textContent = `${curves[i].method}, round ${shownRound(curves[i], index) + 1}:`;
    });
    box.setAttribute("aria-label", `${title}: ${curves.map((one) => `${one.method} ${one.which} ${text(one)}`).join("; ")}`);
    const ink = getComputedStyle(root).getPropertyValue("--faint").trim();
    const grid = { stroke: getComputedStyle(root).getPropertyValue("--line").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const columns = [], series = [{}], bands = [];
    for (const one of curves) {
      const stroke = colorOf(one.method);
      if (one.band.length) {
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}2e` });
        series.push({ points: { show: false } }, { points: { show: false } });
      }
      for (const _ of one.seeds) series.push({ stroke: `${stroke}80`, width: 1, dash: DASHES[one.which], spanGaps: true, points: { show: false } });
      series.push({ stroke, width: one.which === "fused" ? 2.2 : 1.3, dash: DASHES[one.which], spanGaps: true,
        points: { show: rounds === 1 || (one.which === "fused" && rounds < 40), size: 5 } });
      columns.push(...one.band, ...one.seeds, one.values);
    }
    charts.push(new uPlot({
      width: Math.max(240, box.clientWidth), height: 260, legend: { show: false }, bands, series,
      cursor: { drag: { x: true, y: false }, sync: { key: "rounds" } },
      scales: { x: { time: false, range: (_, from, to) => (from === to ? [from - 1, to + 1] : [from, to]) }, y: { range } },
      axes: [
        { ...axis, label: "round", labelFont: axis.font, labelSize: 20, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
        { ...axis, label: `test ${score} in %`, labelFont: axis.font, labelSize: 20, size: 44 },
      ],
      hooks: { setCursor: [(plot) => say(plot.cursor.idx)] },
    }, [x, ...columns], box));
    say(null);
  }

  function plain(text) { // a table of options reads better than its JSON
    if (!text.startsWith("[{")) return text;
    try {
      return JSON.parse(text).map((one) => Object.entries(one).filter(([, value]) => value !== "").map(([key, value]) => `${key} ${value}`).join(", ")).join("; ");
    } catch { return text; } // it was cut
  }

  function drawKeys() {
    const runs = visible(), every = byId("every-key").checked;
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((name) => {
      const values = new Set(runs.map((run) => run.config[name]));
      return every || (values.size > 1 && name !== "description" && !name.startsWith("versions."));
    });
    const rows = names.map((name) => make("tr", {}, make("th", { class: "text", scope: "row" }, name),
      ...runs.map((run) => make("td", { class: "text" }, plain(run.config[name] ?? "–")))));
    if (!rows.length) rows.push(make("tr", {}, make("td", { class: "text", colspan: runs.length + 1 }, "nothing differs between the runs shown")));
    fill("keys", [make("th", { class: "text", scope: "col" }, "key"),
      ...runs.map((run) => make("th", { class: "text", scope: "col" }, swatch(colorOf(run.method)), " ", run.name))], rows);
  }

  function drawTime() {
    const runs = visible().map((run) => {
      const spent = { ...run.seconds };
      if (spent.fuse) spent.fuse = Math.max(0, spent.fuse - (spent.ask || 0) - (spent.distill || 0));
      return { run, spent, total: Object.keys(STAGES).reduce((sum, stage) => sum + (spent[stage] || 0), 0) };
    });
    const longest = Math.max(1e-9, ...runs.map((one) => one.total));
    const called = (stage) => (stage === "fuse" ? "rest of fuse" : stage);
    byId("stages").replaceChildren(...Object.entries(STAGES).map(([stage, color]) => make("li", {}, swatch(color), ` ${called(stage)}`)));
    byId("time").replaceChildren(...runs.map(({ run, spent, total }) => {
      const words = Object.keys(STAGES).filter((stage) => spent[stage]).map((stage) => `${called(stage)} ${duration(spent[stage])}`);
      const bar = make("div", { class: "bar", role: "img", "aria-label": `${run.name}: ${words.join(", ") || "nothing yet"}` });
      for (const [stage, color] of Object.entries(STAGES)) {
        const piece = make("span", { title: `${called(stage)} ${duration(spent[stage])}` });
        piece.style.width = `${(100 * (spent[stage] || 0)) / longest}%`;
        piece.style.background = color;
        bar.append(piece);
      }
      return make("div", { class: "timed" }, make("span", {}, run.name), bar, make("span", {}, duration(total)));
    }));
  }

  function drawWhich() {
    const before = byId("which").value, runs = visible();
    byId("which").replaceChildren(...runs.map((run) => make("option", { value: run.path }, run.name)));
    const first = runs.find((run) => run.tested && run.method !== "FedAvg") ?? runs.find((run) => run.method !== "FedAvg") ?? runs[0];
    if (runs.length) byId("which").value = runs.some((run) => run.path === before) ? before : first.path;
  }

  function heat(text, share, given = {}) {
    const cell = make("td", { class: "sampled", ...given }, text);
    cell.style.setProperty("--heat", Math.min(1, Math.max(0, share)));
    return cell;
  }

  const columnHead = (text) => make("th", { scope: "col" }, text);
  const rowHead = (text) => make("th", { class: "text", scope: "row" }, text);
  const corner = (text) => make("th", { class: "text", scope: "col" }, text);

  function drawDetails() {
    const run = data.runs.find((one) => one.path === byId("which").value);
    for (const id of ["clients", "drifts", "classes", "confusion", "dropped", "partition", "clients-note"]) byId(id).replaceChildren();
    if (!run) return;
    drawClients(run);
    drawTested(run.tested);
    const lost = run.happened.flatMap((one, i) => one.dropped.map((each) => ({ round: i + 1, ...each }))).slice(-200).reverse();
    const rows = lost.map((one) => make("tr", {}, make("td", {}, one.round), make("td", { class: "text" }, one.client),
      make("td", { class: "text" }, one.reason)));
    if (!rows.length) rows.push(make("tr", {}, make("td", { class: "text", colspan: 3 }, "none")));
    fill("dropped", ["round", "client", "reason"].map(corner), rows);
    drawPartition(run.partition);
  }

  function drawClients(run) {
    const first = Math.max(0, run.happened.length - MOST_ROUNDS);
    const rounds = run.happened.slice(first);
    const everyone = [...new Set(rounds.flatMap((one) => [...one.clients, ...one.dropped.map((lost) => lost.client)]))].sort();
    const clients = everyone.slice(0, MOST_CLIENTS);
    const logged = rounds.some((one) => Object.keys(one.accuracies).length);
    byId("clients-note").textContent = (logged ? "a number is the client's own test accuracy in %" : "● took part")
      + "; ✕ dropped or refused; ○ left out by drop-worst"
      + (first ? `; the last ${MOST_ROUNDS} rounds` : "")
      + (everyone.length > clients.length ? `; ${MOST_CLIENTS} of ${everyone.length} clients` : "");
    const head = () => [corner("client"), ...rounds.map((_, i) => columnHead(first + i + 1))];
    const table = (cell) => clients.map((name) => make("tr", {}, rowHead(name), ...rounds.map((one) => cell(one, name))));
    fill("clients", head(), table((one, name) => {
      const lost = one.dropped.find((each) => each.client === name);
      if (lost && !one.clients.includes(name)) return make("td", { class: "lost", title: lost.reason }, "✕");
      if (!one.clients.includes(name)) return make("td", {}, "");
      const worst = one.worst.includes(name), accuracy = one.accuracies[name];
      return heat(known(accuracy) ? Math.round(100 * accuracy) : worst ? "○" : "●", accuracy ?? 0.5, worst ? { class: "sampled worst" } : {});
    }));
    const most = Math.max(1e-9, ...rounds.flatMap((one) => Object.values(one.drifts).filter(known)));
    if (rounds.some((one) => Object.keys(one.drifts).length)) {
      fill("drifts", head(), table((one, name) => (one.drifts[name] ? heat(Math.round(100 * one.drifts[name]), one.drifts[name] / most) : make("td", {}, one.drifts[name] === 0 ? "–" : ""))));
    } else fill("drifts", [corner("not in this run's records")], []);
  }

  function drawTested(tested) {
    if (!tested) {
      fill("classes", [corner("not written yet: a run does so at its end")], []);
      return;
    }
    const models = Object.entries(tested.confusion);
    const share = (rows, label) => rows[label][label] / Math.max(1, rows[label].reduce((sum, count) => sum + count, 0));
    fill("classes", [corner("class"), ...models.map(([name]) => columnHead(name))], tested.classes.map((called, label) => make("tr", {},
      rowHead(called), ...models.map(([, rows]) => heat(percent(share(rows, label)), share(rows, label))))));
    byId("confusion").replaceChildren(...models.map(([name, rows]) => {
      if (rows.length > MOST_CLASSES) return make("p", { class: "note" }, `${name}: ${rows.length} classes are too many to be drawn`);
      const body = rows.map((row, label) => {
        const total = Math.max(1, row.reduce((sum, count) => sum + count, 0));
        return make("tr", {}, rowHead(tested.classes[label] ?? label), ...row.map((count, answer) => {
          const given = { title: `${tested.classes[label]} taken for ${tested.classes[answer]}: ${count}`, class: `sampled${label === answer ? " right" : ""}` };
          return count ? heat(Math.round((100 * count) / total), count / total, given) : make("td", {}, "");
        }));
      });
      const head = make("tr", {}, corner("true"), ...rows.map((_, label) => columnHead(tested.classes[label] ?? label)));
      return make("figure", {}, make("figcaption", {}, name), make("div", { class: "wide", tabindex: 0 },
        make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, ...body))));
    }));
  }

  function drawPartition(partition) {
    if (!partition || !partition.counts.length) {
      byId("partition").append(make("p", { class: "note" }, "The run did not write it down."));
      return;
    }
    const counts = partition.counts.slice(0, MOST_CLIENTS), classes = counts[0].length;
    const most = Math.max(1, ...counts.flat()), cell = classes > 40 ? 10 : 20;
    const left = 16 + 7 * Math.max(3, ...partition.classes.map((name) => name.length));
    const svg = draw("svg", { width: Math.max(left + 300, left + counts.length * cell + 10), height: classes * cell + 44, role: "img",
      "aria-label": `${counts.length} clients, ${classes} classes or groups; the largest dot is ${most} examples` });
    counts.forEach((row, client) => {
      const x = left + (client + 0.5) * cell;
      if (client % Math.ceil(counts.length / 40) === 0) svg.append(draw("text", { x, y: classes * cell + 16, "text-anchor": "middle" }, client));
      row.forEach((count, label) => {
        if (!count) return;
        const y = (classes - label - 0.5) * cell;
        svg.append(draw("circle", { cx: x, cy: y, r: 0.47 * cell * Math.sqrt(count / most) }, draw("title", {}, `client ${client}, ${partition.classes[label] ?? `number ${label}`}: ${count}`)));
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

  function redraw() { // all, and the focus stays on the box that had it
    const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    for (const part of [drawRuns, drawCharts, drawKeys, drawTime, drawWhich, drawDetails]) part();
    if (focused) [...document.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused)?.focus();
  }

  function update(found) {
    const before = new Set(data.runs.map((run) => run.path));
    const added = found.runs.filter((run) => !before.has(run.path));
    data = found;
    if (shown === null) {
      const newest = [...found.runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, AT_FIRST);
      shown = new Set(newest.map((run) => run.path));
    } else {
      for (const run of added) shown.add(run.path); // a run that begins while one looks
    }
    drawHeadlines();
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
  for (const box of document.querySelectorAll('input[name="line"], input[name="each"]')) box.addEventListener("change", drawCharts);
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
