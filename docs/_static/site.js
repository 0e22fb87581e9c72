// What the pages do in a browser: the sidebar shows where the reader is.
const current = document.querySelector(".sidebar-tree .current-page");
const scrolled = document.querySelector(".sidebar-scroll");
if (current && scrolled) {
  const { top, bottom } = current.getBoundingClientRect();
  if (top < 0 || bottom > innerHeight) scrolled.scrollTop += top - innerHeight / 3;
}
