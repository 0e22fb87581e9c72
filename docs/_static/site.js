// What the pages do in a browser: the sidebar shows where the reader is, and the words of a search are marked.
const current = document.querySelector(".sidebar-tree .current-page");
const scrolled = document.querySelector(".sidebar-scroll");
if (current && scrolled) {
  const { top, bottom } = current.getBoundingClientRect();
  if (top < 0 || bottom > innerHeight) scrolled.scrollTop += top - innerHeight / 3;
}

// Whole words, where Sphinx marks "loss" in "lossless"
SphinxHighlight.highlightSearchWords = () => {
  const terms = (localStorage.getItem("sphinx_highlight_terms") ?? "").split(" ").filter(Boolean);
  localStorage.removeItem("sphinx_highlight_terms");
  const main = document.querySelector("[role=main]");
  if (!terms.length || !main) return;
  const any = terms.map((term) => term.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")).join("|");
  const word = new RegExp(`(?<![\\p{L}\\p{N}])(?:${any})(?:s|es|d|ed|ing)?(?![\\p{L}\\p{N}])`, "giu");
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    if (!walker.currentNode.parentElement.closest("script, style, svg, math, button, .snb-widget")) texts.push(walker.currentNode);
  }
  for (const text of texts) {
    let last = 0;
    const parts = [];
    for (const found of text.data.matchAll(word)) {
      const span = document.createElement("span");
      span.className = "highlighted";
      span.textContent = found[0];
      parts.push(text.data.slice(last, found.index), span);
      last = found.index + found[0].length;
    }
    if (parts.length) text.replaceWith(...parts, text.data.slice(last));
  }
};
