// Wide tables and lines of code scroll inside their frames; the keyboard must reach these.
const reach = () => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((frame) => {
  if (frame.tagName !== "CODE" || frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
});
addEventListener("resize", reach);
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
