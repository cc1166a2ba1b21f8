"use strict";
// Elements, numbers, ticks and CSV files. All text is set through textContent.

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function formatNumber(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size !== 0 && size < 0.001)) return value.toExponential(2).replaceAll("-", "−");
  const form = size >= 10000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: size >= 1000 ? 5 : 4 };
  const text = value.toLocaleString("en-US", form);
  return text.replace("-", "−");
}

const formatPercent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : "–");

// Round numbers that cover low..high in about `count` steps; integers if fractions make no sense.
function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / count, whole && high - low >= 1 ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (whole && rough < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((unit) => unit * power).find((unit) => unit >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) found.push(10 ** power);
  const every = Math.ceil(found.length / 6);
  return found.filter((value, i) => i % every === 0 && value >= low * 0.999 && value <= high * 1.001);
}

// An apostrophe keeps spreadsheets from running text as a formula; numbers stay numbers.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvText = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

function download(name, rows) {
  const address = URL.createObjectURL(new Blob([csvText(rows)], { type: "text/csv;charset=utf-8" }));
  const link = element("a", { href: address, download: `${name.replace(/[^A-Za-z0-9]+/g, "-").slice(0, 60)}.csv` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csvButton(name, what, rows) {
  const label = `Download the data of “${what}” as CSV`;
  return element("button", { class: "csv", type: "button", title: label, "aria-label": label, text: "↓ CSV", onclick: () => download(name, rows()) });
}

// Calls draw(width) now and whenever the width of the node changes.
function whenSized(node, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(node);
}

// Places a floating box near a point and keeps it inside its container.
function placeTip(tip, container, x, y) {
  tip.hidden = false;
  const left = x + 16 + tip.offsetWidth > container.clientWidth ? x - 16 - tip.offsetWidth : x + 16;
  tip.style.left = `${Math.max(0, Math.min(left, container.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, Math.min(y - tip.offsetHeight / 2, container.clientHeight - tip.offsetHeight))}px`;
}
