// Replaces the parts of the page that have changed. The server escapes all text.
"use strict";

// Base path of the server behind a proxy.
const base = new URL(document.currentScript.src).pathname.replace(/\/live\.js$/, "");
const parts = document.getElementById("parts");
const note = document.getElementById("live");
const FOCUSABLE = "a, button, input, summary, [tabindex]";
let source = null;

const all = (section, what) => Array.from(section.querySelectorAll(what));

// Key to find an element again after its section was replaced.
const nameOf = (element) =>
  element.value || element.getAttribute("href") || element.getAttribute("aria-label") || element.textContent;

// Replaces the contents of a section, and keeps choices, focus and scroll positions.
function swap(section, html) {
  const open = all(section, "details").map((details) => details.open);
  const checked = new Set(all(section, "input:checked").map((input) => input.value));
  const scrolled = all(section, ".scroll").map((box) => box.scrollLeft);
  const focused = section.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  section.innerHTML = html;
  all(section, "details").forEach((details, i) => { if (i < open.length) details.open = open[i]; });
  all(section, "input").forEach((input) => { input.checked = checked.has(input.value); });
  all(section, ".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
  if (focused !== null) {
    const again = all(section, FOCUSABLE).find((element) => nameOf(element) === focused);
    if (again) again.focus({ preventScroll: true });
  }
}

function update(message) {
  const { ids, changed } = JSON.parse(message.data);
  for (const section of Array.from(parts.children)) {
    if (!ids.includes(section.id)) section.remove();
  }
  ids.forEach((id, i) => {
    if (parts.children[i] && parts.children[i].id === id) return;
    const section = document.getElementById(id) || document.createElement("section");
    section.id = id;
    parts.insertBefore(section, parts.children[i] || null);
  });
  for (const { id, hash, html } of changed) {
    const section = document.getElementById(id);
    if (section.dataset.hash !== hash) swap(section, html);
    section.dataset.hash = hash;
  }
  note.textContent = "Live: this page follows its runs.";
}

function connect() {
  if (source !== null || document.hidden) return;
  source = new EventSource(base + "/live" + (location.pathname.slice(base.length) || "/") + location.search);
  source.onmessage = update;
  source.onerror = () => {
    note.textContent = "The server does not respond. This page tries again.";
    // Browsers do not reconnect after a response that is not an event stream.
    if (source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(connect, 5000);
    }
  };
}

// Browsers limit the connections to a server, so hidden pages close theirs.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && source !== null) {
    source.close();
    source = null;
  }
  connect();
});
connect();
