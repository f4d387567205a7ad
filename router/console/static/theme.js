// The choice between light and dark, before anything is painted. No module: those run too late.
(function () {
  "use strict";
  var choice = "auto";
  try { choice = localStorage.getItem("kvrelay.theme") || "auto"; } catch (_) { /* storage is off */ }
  if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
})();
