// Runs before the first paint, so that the chosen theme does not flash: the saved choice, else the system's.
"use strict";
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
