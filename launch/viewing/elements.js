"use strict";
// Elements of the page. All text is written with textContent: a model may say anything.

function element(name, properties = {}, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("aria-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function shown(number) {
  if (typeof number !== "number") return "–";
  if (Math.abs(number) >= 1000 || Number.isInteger(number)) return String(Math.round(number));
  return Math.abs(number) < 1e-3 ? number.toExponential(1) : number.toPrecision(3);
}
