// Wide tables scroll inside their frames; the keyboard must reach these.
const reach = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((frame) => { frame.tabIndex = 0; });
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
