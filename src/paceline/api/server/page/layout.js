// Where the nodes of a step's tree stand: depth from left to right, the accepted path along the top.
//
// Pure: a tree as the server tells it in, boxes and edges out. Sizes in pixels.

const CHAR = 7.8; // of the monospace font in style.css
const PADDING = 8;
const GAP = 30; // between columns
const ROW = 34;
const HEIGHT = 24;
const MARGIN = 4;
const LONGEST = 16; // characters of a node's text

// A tree's nodes: { index, text, kind, depth, parent, source, score, x, y, width }, and the whole's size.
// `kind` is root, accepted, own or rejected; the model's own token follows the path, without an index.
export function layOut(tree) {
  const nodes = nodesOf(tree);
  const children = new Map(nodes.map((node) => [node, []]));
  for (const node of nodes) if (node.parent) children.get(node.parent).push(node);
  let rows = 0;
  // A parent stands beside its first child; the path comes first, then what was thought most likely.
  const place = (node, row) => {
    node.row = row;
    rows = Math.max(rows, row + 1);
    children
      .get(node)
      .sort((a, b) => rank(a) - rank(b) || b.score - a.score)
      .forEach((child, i) => place(child, i ? rows : row));
  };
  if (nodes.length) place(nodes[0], 0);
  const widths = [];
  for (const node of nodes) {
    node.width = Math.max(24, widthOf(node.text) * CHAR + 2 * PADDING);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const starts = [MARGIN];
  for (const width of widths) starts.push(starts[starts.length - 1] + width + GAP);
  for (const node of nodes) {
    node.x = starts[node.depth];
    node.y = MARGIN + node.row * ROW;
  }
  return {
    nodes,
    width: starts[starts.length - 1] - GAP + MARGIN,
    height: rows * ROW - (ROW - HEIGHT) + 2 * MARGIN,
    nodeHeight: HEIGHT,
  };
}

function nodesOf(tree) {
  const path = new Set(tree.path);
  const nodes = [];
  tree.tokens.forEach((piece, index) => {
    const parent = nodes[tree.parents[index]] ?? null;
    let kind = path.has(index) ? "accepted" : "rejected";
    if (index === 0) kind = "root";
    nodes.push({
      index,
      kind,
      parent,
      piece,
      text: visible(piece),
      depth: parent ? parent.depth + 1 : 0,
      source: tree.sources[index],
      score: tree.scores[index] ?? -Infinity,
    });
  });
  const end = nodes[tree.path[tree.path.length - 1]];
  for (const piece of tree.emitted.slice(tree.path.length - 1)) {
    const own = { index: null, kind: "own", parent: end, piece, text: visible(piece) };
    nodes.push({ ...own, depth: end.depth + 1, source: "target", score: 0 });
  }
  return nodes;
}

function rank(node) {
  return node.kind === "rejected" ? 1 : 0;
}

// A token's text with its spaces to be seen.
export function visible(piece) {
  const shown = piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
  const characters = [...shown];
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}…` : shown;
}

// In characters of the font: most signs above the alphabets are twice as wide.
function widthOf(text) {
  return [...text].reduce((sum, sign) => sum + (sign.codePointAt(0) > 0x2e7f ? 2 : 1), 0);
}
