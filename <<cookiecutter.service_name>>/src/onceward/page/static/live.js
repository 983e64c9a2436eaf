"use strict";
const live = document.getElementById("live");
if (live) {
  const source = new EventSource(live.dataset.stream);
  // The server sends rendered and escaped HTML.
  source.onmessage = (event) => {
    document.getElementById("off").hidden = true;
    if (live.querySelector(":active")) return; // not while a link is pressed
    const inside = live.contains(document.activeElement);
    const held = inside ? document.activeElement.getAttribute("href") : null;
    live.innerHTML = event.data;
    // Keep the keyboard focus on the same link.
    const same = (one) => one.getAttribute("href") === held;
    if (held !== null) [...live.querySelectorAll("a")].find(same)?.focus({ preventScroll: true });
  };
  source.onerror = () => {
    document.getElementById("off").hidden = false;
  };
}
