// What is wider than its box can be scrolled with the keyboard; what fits is no stop of the tab key.
const BOXES = ".content pre, .table-wrapper, .cell_output, .formula";

function mark() {
  for (const box of document.querySelectorAll(BOXES)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

addEventListener("load", mark);
addEventListener("resize", mark);
document.addEventListener("toggle", mark, true); // a folded cell opens
