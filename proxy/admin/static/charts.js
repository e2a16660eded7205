// The curves of a run's page: fetched from /curves, and again whenever the event stream reports a change.
"use strict";
(() => {
  const live = document.getElementById("live");
  const connection = document.getElementById("connection");
  const REFRESH_MS = 1000; // a busy run reports many changes a second; one fetch a second shows them all
  const charts = new Map();

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const color = (name, alpha) => {
    probe.style.color = `var(--${name})`;
    const solid = getComputedStyle(probe).color;
    if (alpha === undefined) return solid;
    const parts = solid.match(/[\d.]+/g);
    return `rgba(${parts[0]}, ${parts[1]}, ${parts[2]}, ${alpha})`;
  };

  const font = (size) => `${size}px Inter, system-ui, sans-serif`;
  const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const fixed = (digits) => (value) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));

  const axis = (extra) => ({
    stroke: () => color("muted"),
    grid: { stroke: () => color("grid"), width: 1 },
    ticks: { show: false },
    font: font(11),
    gap: 6,
    ...extra,
  });
  const xAxis = (extra) => axis({ grid: { show: false }, size: 26, space: 90, ...extra });
  const timeAxis = () => xAxis({ values: (_plot, ticks) => ticks.map(time), space: 80 });
  const yAxis = (extra) => axis({ size: 44, space: 34, ...extra });

  const line = (name, label, extra) => ({
    label,
    stroke: () => color(name),
    width: 2,
    points: { show: false },
    ...extra,
  });
  const filled = (name) => (plot) => {
    if (!Number.isFinite(plot.bbox?.height)) return color(name); // uPlot first asks for the legend's marker, before the layout
    const gradient = plot.ctx.createLinearGradient(0, plot.bbox.top, 0, plot.bbox.top + plot.bbox.height);
    gradient.addColorStop(0, color(name, 0.22));
    gradient.addColorStop(1, color(name, 0));
    return gradient;
  };

  const padded = (floor) => (_plot, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    const room = Math.max((high - low) * 0.08, floor);
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  };
  // Rewards mostly live in [0, 1] or [-1, 1]: these bounds stay fixed, so that heights are comparable between runs.
  const rewardRange = (_plot, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (low >= 0 && high <= 1) return [0, 1.04];
    if (low >= -1 && high <= 1) return [-1.04, 1.04];
    return padded(0.04)(_plot, low, high);
  };
  const fromZero = (least) => (_plot, _low, high) => [0, Math.max(least, (high || 0) * 1.1)];

  const designs = {
    "chart-reward": {
      height: 260,
      options: () => ({
        scales: { x: { time: false }, y: { range: rewardRange } },
        axes: [xAxis({ values: (_plot, ticks) => ticks.map((tick) => tick.toLocaleString()) }), yAxis()],
        series: [
          { label: "sessions", value: (_plot, value) => (value === null ? "–" : value.toLocaleString()) },
          line("accent", "mean", { width: 2.5, fill: filled("accent"), value: (_plot, value) => fixed(3)(value) }),
        ],
      }),
      data: (curves) => [curves.reward.map((point) => point.sessions), curves.reward.map((point) => point.moving_mean)],
    },
    "chart-staleness": {
      height: 160,
      options: () => ({
        scales: { x: { time: false }, y: { range: fromZero(1) } },
        axes: [xAxis({ incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000], values: (_plot, ticks) => ticks.map((tick) => `v${tick}`) }), yAxis({ size: 32 })],
        series: [
          { label: "version", value: (_plot, value) => (value === null ? "–" : `v${value}`) },
          line("amber", "mean", { value: (_plot, value) => fixed(2)(value) }),
          line("amber-soft", "max", { width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), value: (_plot, value) => fixed(0)(value) }),
        ],
      }),
      data: (curves) => {
        const steps = curves.steps.filter((step) => step.version > 0);
        return [steps.map((step) => step.version), steps.map((step) => step.staleness_mean), steps.map((step) => step.staleness_max)];
      },
    },
    "chart-version": {
      height: 160,
      options: () => ({
        scales: { y: { range: fromZero(1) } },
        axes: [timeAxis(), yAxis({ size: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] })],
        series: [
          { label: "time", value: (_plot, value) => (value === null ? "–" : time(value)) },
          line("violet", "version", { fill: filled("violet"), paths: uPlot.paths.stepped({ align: 1 }), value: (_plot, value) => (value === null ? "–" : `v${value}`) }),
        ],
      }),
      data: (curves) => {
        const served = curves.steps.filter((step) => step.served_at !== null);
        const times = served.map((step) => step.served_at);
        const versions = served.map((step) => step.version);
        if (served.length) {
          times.push(Math.max(times[times.length - 1] + 0.001, curves.rate.length ? curves.rate[curves.rate.length - 1].at : 0));
          versions.push(versions[versions.length - 1]);
        }
        return [times, versions];
      },
    },
    "chart-rate": {
      height: 160,
      options: () => ({
        scales: { y: { range: fromZero(10) } },
        axes: [timeAxis(), yAxis({ size: 48 })],
        series: [
          { label: "time", value: (_plot, value) => (value === null ? "–" : time(value)) },
          line("blue", "tokens/s", { fill: filled("blue"), value: (_plot, value) => fixed(0)(value) }),
        ],
      }),
      data: (curves) => [curves.rate.map((point) => point.at), curves.rate.map((point) => point.tokens_per_second)],
    },
  };

  const draw = (id, curves) => {
    const element = document.getElementById(id);
    const design = designs[id];
    const data = design.data(curves);
    if (!data[0].length) {
      element.dataset.empty = "nothing to draw yet";
      return;
    }
    delete element.dataset.empty;
    const known = charts.get(id);
    if (known) {
      known.setData(data);
    } else {
      const options = { ...design.options(), width: element.clientWidth, height: design.height, legend: { live: true }, cursor: { y: false, points: { size: 7 } }, padding: [8, 28, 0, 0] };
      charts.set(id, new uPlot(options, data, element));
    }
    element.dataset.points = String(data[0].length);
    element.dataset.last = String(data[1][data[1].length - 1]);
  };

  // Returns null while the proxy is unreachable; the event stream reconnects and then triggers a refresh.
  const fetchCurves = async () => {
    try {
      const reply = await fetch(live.dataset.curves, { headers: { "hx-request": "true" } });
      return reply.ok ? await reply.json() : null;
    } catch {
      return null;
    }
  };

  let curves = null;
  let wanted = false;
  let busy = false;
  const refresh = async () => {
    if (busy) {
      wanted = true;
      return;
    }
    busy = true;
    wanted = false;
    setTimeout(() => {
      busy = false;
      if (wanted) refresh();
    }, REFRESH_MS);
    const fresh = await fetchCurves();
    if (!fresh) return;
    curves = fresh;
    for (const id of Object.keys(designs)) draw(id, curves);
  };

  const redraw = () => {
    for (const chart of charts.values()) chart.destroy();
    charts.clear();
    if (curves) for (const id of Object.keys(designs)) draw(id, curves);
  };

  const showConnection = (state, text) => {
    connection.className = `connection ${state}`;
    connection.textContent = text;
  };
  live.addEventListener("htmx:sseOpen", () => showConnection("on", "live"));
  live.addEventListener("htmx:sseError", () => showConnection("off", "disconnected, reconnecting"));
  live.addEventListener("htmx:sseMessage", (event) => {
    if (event.detail.type === "summary") {
      if (live.classList.contains("is-empty") && document.querySelector("#summary .legend li")) {
        live.classList.remove("is-empty");
        document.getElementById("start").remove();
      }
      refresh();
    }
  });
  document.addEventListener("themechange", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    for (const [id, chart] of charts) {
      const width = document.getElementById(id).clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: designs[id].height });
    }
  }).observe(live);

  document.fonts.ready.then(refresh);
})();
