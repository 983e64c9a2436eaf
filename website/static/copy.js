/* A button on each block of code, which copies it. What commands print has none. */
if (navigator.clipboard) {  // not on pages by HTTP without TLS, except of this machine
  const printed = ["text", "none", "default"].map((one) => `.highlight-${one}`);
  for (const block of document.querySelectorAll('article div[class*="highlight-"]')) {
    if (block.matches(printed.join())) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent.trimEnd());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2_000);
    });
    block.append(button);
  }
}
