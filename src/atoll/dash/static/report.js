// The report: its data lies in the page; it is drawn once, and again when the colours change.
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  Atoll.render(run);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Atoll.render(run));
})();
