// Draws the tree of one step as SVG, and says the same in words for those who do not see it.

import { layOut, visible } from "./layout.js";
import { labelOf, markOf } from "./sources.js";

const SVG = "http://www.w3.org/2000/svg";

export function drawTree(place, tree) {
  const { nodes, width, height, nodeHeight } = layOut(tree);
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", inWords(tree));
  for (const node of nodes) if (node.parent) svg.append(edge(node, nodeHeight));
  for (const node of nodes) svg.append(box(node, nodeHeight));
  place.replaceChildren(svg);
}

// What a tree shows, as one sentence.
export function inWords(tree) {
  const drafted = tree.tokens.length - 1;
  const accepted = tree.path.slice(1).map((node) => quoted(tree.tokens[node]));
  const own = tree.emitted.slice(accepted.length).map(quoted);
  if (!drafted) return `Nothing was drafted; the model's own token is ${own.join(" ") || "missing"}.`;
  const path = accepted.length ? `accepted ${accepted.join(" ")}` : "accepted none";
  const then = own.length ? `, then the model's own token ${own[0]}` : "";
  return `${drafted} drafted: ${path}, rejected ${drafted - accepted.length}${then}.`;
}

const quoted = (piece) => `“${visible(piece)}”`;

function edge(node, height) {
  const from = node.parent;
  const [x, y] = [from.x + from.width, from.y + height / 2];
  const [toX, toY] = [node.x, node.y + height / 2];
  const middle = toX - 15; // all branches of a column turn at one place
  const path = `M${x} ${y}H${middle - 6}Q${middle} ${y} ${middle} ${y + 6}V${toY - 6}Q${middle} ${toY} ${toX} ${toY}`;
  const d = y === toY ? `M${x} ${y}H${toX}` : path;
  return element("path", { d, class: `edge ${node.kind}` });
}

function box(node, height) {
  const group = element("g", { class: `node ${node.kind}`, "data-mark": markOf(node.source) });
  if (node.index !== null) group.dataset.node = node.index;
  const title = element("title", {});
  title.textContent = `${quoted(node.piece)}: ${story(node)}`;
  const rx = node.kind === "own" ? height / 2 : 3;
  const rect = element("rect", { x: node.x, y: node.y, width: node.width, height, rx });
  const text = element("text", { x: node.x + node.width / 2, y: node.y + height / 2 });
  text.textContent = node.text;
  group.append(title, rect, text);
  return group;
}

function story(node) {
  if (node.kind === "root") return "the newest token before the step";
  if (node.kind === "own") return "the model's own token";
  const chance = (100 * Math.exp(node.score)).toFixed(0);
  return `${labelOf(node.source)} with a chance of ${chance} %, ${node.kind}`;
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
