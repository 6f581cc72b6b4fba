// What the generated pages lack for a keyboard and a screen reader: a level on the captions of the menu, and a way to
// reach regions that scroll sideways.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll('p.caption[role="heading"]').forEach((caption) => caption.setAttribute("aria-level", "2"));
  document.querySelectorAll("pre, .table-wrapper, .rankscope, div.math").forEach((region) => {
    if (!region.hasAttribute("tabindex")) region.setAttribute("tabindex", "0");
  });
});
