// Counts the texts of a page that can be seen, and lists those with less contrast than WCAG 2.2 (AA) asks for:
// 4.5, or 3 where they are large (https://www.w3.org/TR/WCAG22/#contrast-minimum).

const parts = (colour) => {
  const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return [red, green, blue, alpha];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};

/** The colours of a text and of what is behind it, with the opacity of everything that it stands in. */
function colours(element) {
  const around = [];
  for (let at = element; at; at = at.parentElement) around.unshift(getComputedStyle(at));
  const back = around.reduce((below, style) => over(parts(style.backgroundColor), below), [255, 255, 255, 1]);
  const opacity = around.reduce((product, style) => product * Number(style.opacity), 1);
  const own = around.at(-1);
  const ink = parts(element instanceof SVGElement ? own.fill : own.color);
  return { ink: over([...ink.slice(0, 3), ink[3] * opacity], back), back, own };
}

const faint = [];
let texts = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const said = walker.currentNode.textContent.trim();
  if (!said || !element.checkVisibility() || element.closest("script, style, noscript")) continue;
  texts += 1;
  const { ink, back, own } = colours(element);
  const size = parseFloat(own.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(own.fontWeight) >= 700);
  const ratio = contrast(ink, back);
  if (ratio < (large ? 3 : 4.5)) faint.push(`${said.slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return { texts, faint };
