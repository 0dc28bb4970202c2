"use strict";

/** Numbers such as 2e-5 and options such as --rerun: a hyphen in them ends no line. */
const WHOLE = /(\d[\d.]*e-\d+%?|--[a-z]+)/;

/** A text whose long names and paths may be broken behind their dots and slashes, so that no word has to be. */
function breakable(text) {
  const joints = (part) => part.split(/(?<=[A-Za-z_][./_])(?=\w)(?!py\b)/).flatMap((piece, index) => (index ? [document.createElement("wbr"), piece] : [piece]));
  return text.split(WHOLE).flatMap((part, index) => (index % 2 ? [whole(part)] : joints(part)));
}

function whole(text) {
  const span = document.createElement("span");
  span.className = "whole";
  span.append(text);
  return span;
}

/** Does this to what the page shows; what is copied stays as it is. */
function breakLongWords() {
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const long = [];
  while (texts.nextNode()) {
    const { currentNode: text } = texts;
    if ((/\S{20}/.test(text.data) || WHOLE.test(text.data)) && !text.parentElement.closest("svg")) long.push(text);
  }
  for (const text of long) text.replaceWith(...breakable(text.data));
}

/** Shows the element that the address names, also where it is folded away. */
function showLinked() {
  const element = document.querySelector(":target");
  for (let up = element; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  if (element) element.scrollIntoView();
}

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

breakLongWords();
addEventListener("hashchange", showLinked);
showLinked();
