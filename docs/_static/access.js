// What the generated pages lack for a keyboard and a screen reader: a level on the captions of the menu, a way to
// reach regions that scroll sideways, and a way to stop the moving picture; buttons that copy code. And what wraps on a narrow screen.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll('p.caption[role="heading"]').forEach((caption) => caption.setAttribute("aria-level", "2"));
  document.querySelectorAll("figure.landing button.pause").forEach((button) => {
    const pictures = [...button.closest("figure").querySelectorAll("svg")];
    button.hidden = false;
    button.addEventListener("click", () => {
      const resume = pictures[0].animationsPaused();
      pictures.forEach((picture) => (resume ? picture.unpauseAnimations() : picture.pauseAnimations()));
      button.textContent = resume ? "Pause" : "Play";
    });
  });
  // On a narrow screen sentences wrap; tables and code scroll.
  document.querySelectorAll("div.highlight-output pre, div.highlight-console pre, div.highlight-text pre").forEach((pre) => {
    if (!/---|──|│/.test(pre.textContent)) pre.classList.add("sentences");
  });
  // Figures are drawn for a page: on a narrow screen they keep a size at which they can be read, and scroll sideways.
  document.querySelectorAll('article p img[src*="_images/"]:not([src*="/solved_"]):only-child').forEach((picture) => {
    if (!picture.closest(".card")) picture.closest("p").classList.add("scrolling");
  });
  // A button that copies code; of a console, the commands without prompts.
  document.querySelectorAll("div.highlight-python, div.highlight-py, div.highlight-console").forEach((block) => {
    const button = Object.assign(document.createElement("button"), { className: "copy", type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent.replace(/^\$ /gm, ""));
      button.textContent = "Copied";
    });
    block.append(button);
  });
  document.querySelectorAll("pre, .table-wrapper, .rankscope, div.math, p.scrolling").forEach((region) => {
    if (!region.hasAttribute("tabindex")) region.setAttribute("tabindex", "0");
  });
});
