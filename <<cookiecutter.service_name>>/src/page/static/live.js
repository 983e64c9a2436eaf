"use strict";
const live = document.getElementById("live");
if (live) {
  const source = new EventSource(live.dataset.stream);
  // What comes is rendered and escaped by the server.
  source.onmessage = (event) => {
    document.getElementById("off").hidden = true;
    // Not under somebody's fingers.
    if (!live.contains(document.activeElement)) live.innerHTML = event.data;
  };
  source.onerror = () => {
    document.getElementById("off").hidden = false;
  };
}
