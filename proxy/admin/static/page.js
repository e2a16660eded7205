// On every page: the theme switch, and relative times that stay correct while the page is open.
"use strict";
(() => {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    document.dispatchEvent(new Event("themechange"));
  });

  const ago = (seconds) => {
    if (seconds < 1.5) return "just now";
    for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= unit) return `${Math.floor(seconds / unit)}\u2009${name} ago`;
    }
    return `${Math.floor(seconds)}\u2009s ago`;
  };

  const updateTimes = () => {
    for (const element of document.querySelectorAll("time[datetime]")) {
      if (element.dataset.shown === undefined) {
        element.dataset.shown = String(performance.now());
        element.dataset.age = String(ageOf(element.textContent));
        element.title = new Date(element.dateTime).toLocaleString();
      }
      const age = Number(element.dataset.age);
      if (Number.isNaN(age)) continue;
      const text = ago(age + (performance.now() - Number(element.dataset.shown)) / 1000);
      if (element.textContent !== text) element.textContent = text;
    }
  };

  // Ages come from the server's text, not from its timestamp: this machine's clock may be wrong.
  const ageOf = (text) => {
    if (text === "just now") return 0;
    const found = /^(\d+)\s*(s|min|h|d) ago$/.exec(text);
    return found ? Number(found[1]) * { s: 1, min: 60, h: 3600, d: 86400 }[found[2]] : NaN;
  };

  // A refresh replaces elements: details that the visitor has opened stay open.
  let opened = [];
  document.addEventListener("htmx:beforeSwap", () => { opened = [...document.querySelectorAll("details[open][id]")].map((details) => details.id); });
  document.addEventListener("htmx:afterSwap", () => { for (const id of opened) document.getElementById(id)?.setAttribute("open", ""); });

  updateTimes();
  setInterval(updateTimes, 1000);
  document.addEventListener("htmx:afterSettle", updateTimes);
})();
