// Where tokens come from: the server's names, what they are called here and how they are marked.
//
// A mark is a tint and a kind of underline (sources.css), so that nobody depends on colours.

const KNOWN = {
  target: { mark: "target", label: "the model's own" },
  "own text": { mark: "copy", label: "copied from this text" },
  "past outputs": { mark: "past", label: "copied from earlier answers" },
  dflash: { mark: "block", label: "drafted by dflash" },
  ddtree: { mark: "block", label: "drafted by ddtree" },
  eagle3: { mark: "eagle", label: "drafted by eagle3" },
  grammar: { mark: "grammar", label: "forced by the grammar" },
};

export const TARGET = "target";

export function markOf(source) {
  return KNOWN[source]?.mark ?? "other";
}

export function labelOf(source) {
  return KNOWN[source]?.label ?? `drafted by ${source}`;
}

// What a token's title says.
export function storyOf(source) {
  return source === TARGET ? "the model's own token" : `${labelOf(source)}, accepted`;
}

// Fills the legend with the sources that occurred, how often each, the model's own first.
export function showLegend(list, counts) {
  const names = [...counts.keys()].filter((name) => name !== TARGET);
  list.replaceChildren(
    ...[TARGET, ...names].map((name) => {
      const item = document.createElement("li");
      const sample = document.createElement("span");
      sample.className = "token";
      sample.dataset.mark = markOf(name);
      sample.textContent = name === TARGET ? labelOf(name) : `${labelOf(name)}, accepted`;
      item.append(sample, ` ${counts.get(name) ?? 0}`);
      return item;
    }),
  );
}
