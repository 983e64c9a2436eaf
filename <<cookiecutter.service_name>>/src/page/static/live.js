"use strict";
const live = document.getElementById("live");
if (live) {
  const source = new EventSource(live.dataset.stream);
  // What comes is rendered and escaped by the server.
  source.onmessage = (event) => {
    document.getElementById("off").hidden = true;
    if (live.querySelector(":active")) return; // not under somebody's fingers
    const inside = live.contains(document.activeElement);
    const held = inside ? document.activeElement.getAttribute("href") : null;
    live.innerHTML = event.data;
    // Who goes through the links by the keyboard stays where they were.
    const same = (one) => one.getAttribute("href") === held;
    if (held !== null) [...live.querySelectorAll("a")].find(same)?.focus({ preventScroll: true });
  };
  source.onerror = () => {
    document.getElementById("off").hidden = false;
  };
}
