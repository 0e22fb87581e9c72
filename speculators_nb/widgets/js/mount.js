// On a page without a kernel: every .snb-widget gets its widget over the state that is in the page.
import { mount } from "./common.js";

for (const place of document.querySelectorAll(".snb-widget[data-widget]")) {
  import(`./${place.dataset.widget}.js`).then((module) => mount(place, module.default));
}
