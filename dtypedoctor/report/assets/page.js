"use strict";

// What every part of the page uses: elements, the color theme, copying, printing.
// The files of this folder are joined in the order page, modules, explorer, detail, controls.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "text", "g", "defs", "pattern"]);

/** An element. Children are elements or texts, never markup; attributes of null, undefined or false are left out. */
function make(tag, attributes, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Numbers such as 2e-5 and options such as --rerun: a hyphen in them ends no line. */
const WHOLE = /(\d[\d.]*e-\d+%?|--[a-z]+)/;

/** A text whose long names and paths may be broken behind their dots and slashes, so that no word has to be. */
function breakable(text) {
  const joints = (part) => part.split(/(?<=[A-Za-z_][./_])(?=\w)(?!py\b)/).flatMap((piece, index) => (index ? [make("wbr", {}), piece] : [piece]));
  return text.split(WHOLE).flatMap((part, index) => (index % 2 ? [make("span", { class: "whole" }, part)] : joints(part)));
}

/** Does the same to what the page shows from the beginning; what is copied stays as it is. */
function breakLongWords() {
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const long = [];
  while (texts.nextNode()) {
    const { currentNode: text } = texts;
    if ((/\S{20}/.test(text.data) || WHOLE.test(text.data)) && !text.parentElement.closest(".asis, svg")) long.push(text);
  }
  for (const text of long) text.replaceWith(...breakable(text.data));
}

breakLongWords();

const unique = (items) => [...new Set(items)];

document.getElementById("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = dark ? "light" : "dark";
});

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected"; // without leave to write the clipboard the reader copies the selection
    }
  });
}

const folded = [...document.querySelectorAll("details:not([open])")];
addEventListener("beforeprint", () => folded.forEach((part) => { part.open = true; }));
addEventListener("afterprint", () => folded.forEach((part) => { part.open = false; }));
