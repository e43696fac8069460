// Draws the draft tree of a round and steps through the rounds of an answer.
//
// Data (eaglelab/report/trees.py): {sources: [{title, answers, texts, leftOut}]}. Row 0 of a tree is its root, row i
// node i; rows up to `kept` were verified, later ones were looked at and dropped. Every text reaches the page through
// textContent, never as markup.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NODE = 26, PITCH = 33, GAP = 34, CHARACTER = 7.3, MOST_CHARACTERS = 18, TOP = 26;
  const data = JSON.parse(document.getElementById("trees-data").textContent);
  const view = document.getElementById("trees");
  const part = (name) => view.querySelector(`[data-part="${name}"]`);
  const state = { source: 0, answer: 0, round: 0, dropped: false };

  const source = () => data.sources[state.source];
  const answer = () => source().answers[state.answer];
  const round = () => answer().rounds[state.round];

  function element(name, attributes = {}, text = null) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }

  function span(text, kind) {
    const made = document.createElement("span");
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  // ---- one tree ------------------------------------------------------------------------------------------------

  // Line breaks and outer spaces become visible; long tokens are cut.
  function shown(text) {
    const visible = text.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/ /g, "\u2423");
    return visible.length > MOST_CHARACTERS ? `${visible.slice(0, MOST_CHARACTERS - 1)}\u2026` : visible;
  }

  function percent(p) {
    if (p === null) return "?";
    if (p > 0 && p < 0.001) return "<0.1%";
    return `${(100 * p).toFixed(p < 0.0995 ? 1 : 0)}%`;
  }

  // Rows to draw, as {label, kind, parent, p, ...}, the bonus token among them.
  function nodesOf(one, texts) {
    const accepted = new Set(one.accepted), forwarded = new Set(one.forwarded);
    const nodes = [{ row: 0, label: texts[one.root], kind: "root", parent: null, p: 1, children: [] }];
    one.tokens.forEach((token, place) => {
      const row = place + 1, kept = row <= one.kept;
      nodes.push({
        row, label: texts[token], parent: one.parents[place], p: one.confidence[place], children: [],
        kind: !kept ? "dropped" : accepted.has(row) ? "accepted" : "rejected", forwarded: forwarded.has(row),
      });
    });
    for (const node of nodes) node.depth = node.parent === null ? 0 : nodes[node.parent].depth + 1;
    const drawn = nodes.filter((node) => node.kind !== "dropped" || state.dropped);
    for (const node of drawn) if (node.parent !== null) nodes[node.parent].children.push(node);
    for (const node of drawn) node.children.sort((a, b) => (b.p ?? -1) - (a.p ?? -1));
    if (one.bonus !== null) {
      const last = nodes[one.accepted.length ? one.accepted[one.accepted.length - 1] : 0];
      const bonus = {
        row: -1, label: texts[one.bonus], kind: "bonus", parent: last.row, p: null, children: [], depth: last.depth + 1,
      };
      last.children.unshift(bonus);
      drawn.push(bonus);
    }
    return { nodes, drawn };
  }

  // Level by level to the right; every leaf has a line of its own, a parent stands on its first child's.
  function place(drawn) {
    const widths = [];
    for (const node of drawn) {
      node.text = shown(node.label);
      node.note = node.kind === "root" ? "" : node.kind === "bonus" ? "target" : percent(node.p);
      node.width = Math.max(58, Math.ceil(CHARACTER * node.text.length + 6.2 * node.note.length + 30));
      widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
    }
    const left = widths.reduce((at, width) => [...at, at[at.length - 1] + width + GAP], [1]);
    let lines = 0;
    const visit = (node) => {
      node.x = left[node.depth];
      node.y = TOP + lines * PITCH;
      node.children.forEach((child, number) => {
        if (number) lines += 1;
        visit(child);
      });
    };
    visit(drawn[0]);
    return { width: left[left.length - 1] - GAP + 2, height: TOP + lines * PITCH + NODE + 4, left, widths };
  }

  function tell(node, nodes, one) {
    const lines = [`\u201c${node.label}\u201d`];
    if (node.kind === "root") lines.push("the last published token; the tree grows from it");
    if (node.kind === "bonus") lines.push("bonus token: the target's own choice after the accepted path");
    if (node.kind === "accepted") {
      const behind = node.depth > one.count ? ", behind the end of the answer" : "";
      lines.push(`accepted: the target would have said this${behind}`);
    }
    if (node.kind === "rejected") {
      const lost = node.parent !== 0 && nodes[node.parent].kind === "rejected";
      lines.push(lost ? "rejected, with the node before it" : "rejected: the target chose another token here");
    }
    if (node.kind === "dropped") lines.push("looked at, not verified: too unlikely for the tree's budget");
    if (node.p !== null && node.kind !== "root") {
      const parent = nodes[node.parent].p;
      lines.push(`the drafter's probability of the path ${percent(node.p)}`);
      if (parent) lines.push(`of this token after the node before it ${percent(Math.min(1, node.p / parent))}`);
      lines.push(node.forwarded ? "the drafter was run on it" : "the drafter was not run on it");
    }
    return lines.join("\n");
  }

  function edge(from, to) {
    const x = from.x + from.width, y = from.y + NODE / 2, toY = to.y + NODE / 2, bend = Math.min(26, (to.x - x) / 2 + 8);
    const kind = to.kind === "bonus" || to.kind === "accepted" ? to.kind : to.kind === "dropped" ? "dropped" : "";
    const path = `M${x},${y} C${x + bend},${y} ${to.x - bend},${toY} ${to.x},${toY}`;
    return element("path", { class: `edge ${kind}`, d: path });
  }

  function box(node, nodes, one) {
    const group = element("g", { class: `node ${node.kind}`, transform: `translate(${node.x},${node.y})` });
    group.append(element("title", {}, tell(node, nodes, one)));
    group.append(element("rect", { width: node.width, height: NODE, rx: 5 }));
    if (node.p !== null && node.kind !== "root") {
      const length = Math.max(0, Math.min(1, node.p)) * (node.width - 10);
      group.append(element("rect", { class: "bar", x: 5, y: NODE - 4, width: length, height: 2.5, rx: 1 }));
    }
    const middle = NODE / 2 + (node.p !== null && node.kind !== "root" ? 2.5 : 4);
    group.append(element("text", { class: "token", x: 8, y: middle }, node.text));
    group.append(element("text", { class: "note", x: node.width - 8, y: middle, "text-anchor": "end" }, node.note));
    if (node.forwarded) group.append(element("circle", { class: "run", cx: node.width, cy: NODE / 2, r: 3 }));
    return group;
  }

  function draw() {
    const one = round();
    const { nodes, drawn } = nodesOf(one, source().texts);
    const size = place(drawn);
    const svg = element("svg", {
      width: size.width, height: size.height, viewBox: `0 0 ${size.width} ${size.height}`, role: "img",
      "aria-label": `Draft tree of round ${state.round + 1}: ${one.kept} nodes verified, ${one.count} tokens accepted`,
    });
    size.widths.forEach((width, depth) => {
      svg.append(element("text", { class: "level", x: size.left[depth], y: 12 }, depth ? `level ${depth}` : "root"));
    });
    const rank = { dropped: 0, rejected: 1, root: 2, accepted: 3, bonus: 4 };
    const below = [...drawn].sort((a, b) => rank[a.kind] - rank[b.kind]);
    for (const node of below) if (node.parent !== null) svg.append(edge(nodes[node.parent], node));
    for (const node of drawn) svg.append(box(node, nodes, one));
    part("tree").replaceChildren(svg);
    show(nodes[one.accepted[one.accepted.length - 1] ?? 0]);
  }

  // Scrolls a tree that is larger than its frame so that a node can be seen.
  function show(node) {
    const frame = part("tree");
    const inside = (at, length, size) => (at + length < size ? 0 : at + length / 2 - size / 2);
    frame.scrollTop = inside(node.y, 2 * NODE, frame.clientHeight);
    frame.scrollLeft = inside(node.x, 2 * node.width, frame.clientWidth);
  }

  // ---- around the tree -----------------------------------------------------------------------------------------

  function write() {
    const rounds = answer().rounds, one = round();
    const before = answer().opening + rounds.slice(0, state.round).map((r) => r.published.join("")).join("");
    const accepted = one.published.slice(0, one.count).join(""), bonus = one.published.slice(one.count).join("");
    const pieces = [span(before, "before"), span(accepted, "accepted"), span(bonus, "bonus")];
    if (one.stop) pieces.push(span({ eos: "end of the answer", length: "length limit" }[one.stop] ?? one.stop, "stop"));
    part("text").replaceChildren(...pieces);
    part("text").scrollTop = part("text").scrollHeight;
  }

  function count(n, what) {
    return `${n} ${what}${n === 1 ? "" : "s"}`;
  }

  function facts() {
    const one = round(), [draft, , verify] = one.ms;
    const said = [
      one.expanded === null ? null : ["looked at", count(one.expanded, "node")],
      ["verified", `${one.kept} + root`],
      ["accepted", count(one.count, "token")],
      ["published", count(one.published.length, "token")],
      draft === null ? null : ["draft", `${draft.toFixed(1)} ms`],
      verify === null ? null : ["verify", `${verify.toFixed(1)} ms`],
    ];
    part("facts").replaceChildren(...said.filter(Boolean).map(([name, value]) => {
      const made = document.createElement("div");
      const [term, description] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      description.textContent = value;
      made.append(term, description);
      return made;
    }));
  }

  // One bar per round, as high as the number of tokens that it published.
  function overview() {
    const rounds = answer().rounds, most = Math.max(...rounds.map((r) => r.published.length));
    const svg = element("svg", { viewBox: `0 0 ${rounds.length} ${most}`, preserveAspectRatio: "none" });
    rounds.forEach((one, number) => {
      const bar = (y, height, kind) => element("rect", { x: number + 0.08, y, width: 0.84, height, class: kind });
      const column = element("g", { "data-round": number });
      column.append(element("title", {}, `round ${number + 1}: ${count(one.count, "token")} accepted`));
      column.append(element("rect", { x: number, y: 0, width: 1, height: most, class: "back" }));
      column.append(bar(most - one.count, one.count, "accepted"));
      column.append(bar(most - one.published.length, one.published.length - one.count, "bonus"));
      column.addEventListener("click", () => go(number));
      svg.append(column);
    });
    part("overview").replaceChildren(svg);
  }

  function mark() {
    for (const column of part("overview").querySelectorAll("g")) {
      column.classList.toggle("here", Number(column.dataset.round) === state.round);
    }
  }

  function options(select, names, chosen) {
    select.replaceChildren(...names.map((name, number) => {
      const made = document.createElement("option");
      made.value = number;
      made.textContent = name;
      return made;
    }));
    select.value = chosen;
    select.closest("label").hidden = names.length < 2;
  }

  function answerName(one) {
    const turn = one.turn > 1 ? `, turn ${one.turn}` : "";
    const asked = one.prompt ? `: ${one.prompt.replace(/\s+/g, " ").slice(0, 60)}` : "";
    return `${one.id}${turn}${asked}`;
  }

  // ---- stepping ------------------------------------------------------------------------------------------------

  function go(number) {
    const last = answer().rounds.length - 1;
    state.round = Math.max(0, Math.min(last, number));
    part("slider").value = state.round;
    part("place").textContent = `Round ${state.round + 1} of ${last + 1}`;
    part("previous").disabled = part("first").disabled = state.round === 0;
    part("next").disabled = part("last").disabled = state.round === last;
    draw();
    write();
    facts();
    mark();
  }

  function openAnswer(number, at = 0) {
    state.answer = Math.max(0, Math.min(source().answers.length - 1, number));
    options(part("answer"), source().answers.map(answerName), state.answer);
    part("prompt").textContent = answer().prompt ?? "";
    part("question").hidden = !answer().prompt;
    part("slider").max = answer().rounds.length - 1;
    overview();
    go(at);
  }

  // The same answer of another source, where it has one, at about the same place of the text.
  function openSource(number) {
    const now = answer(), done = now.rounds.slice(0, state.round).reduce((n, r) => n + r.published.length, 0);
    state.source = number;
    const same = source().answers.findIndex((one) => one.id === now.id && one.turn === now.turn);
    let at = 0;
    if (same >= 0) {
      for (let n = 0; at < source().answers[same].rounds.length - 1; at += 1) {
        n += source().answers[same].rounds[at].published.length;
        if (n > done) break;
      }
    }
    openAnswer(Math.max(0, same), at);
    part("left").textContent = leftOut();
  }

  function leftOut() {
    const number = source().leftOut;
    return number ? `${count(number, "further answer")} of these records left out of the page.` : "";
  }

  const keys = {
    ArrowLeft: () => go(state.round - 1), ArrowRight: () => go(state.round + 1),
    Home: () => go(0), End: () => go(Infinity),
  };
  // A page of its own takes the keys wherever they are pressed; in a report they scroll unless the viewer has the focus.
  ("alone" in view.dataset ? document : view).addEventListener("keydown", (event) => {
    if (event.target.matches?.("select, input[type=range]") || event.altKey || event.ctrlKey || event.metaKey) return;
    if (!(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  });
  window.addEventListener("resize", write); // the text breaks elsewhere; its end stays in sight
  part("first").addEventListener("click", () => go(0));
  part("previous").addEventListener("click", () => go(state.round - 1));
  part("next").addEventListener("click", () => go(state.round + 1));
  part("last").addEventListener("click", () => go(Infinity));
  part("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  part("answer").addEventListener("change", (event) => openAnswer(Number(event.target.value)));
  part("source").addEventListener("change", (event) => openSource(Number(event.target.value)));
  part("dropped").addEventListener("change", (event) => {
    state.dropped = event.target.checked;
    draw();
  });

  const has = data.sources.some((one) => one.answers.some((a) => a.rounds.some((r) => r.tokens.length > r.kept)));
  part("dropped").closest("label").hidden = !has;
  options(part("source"), data.sources.map((one) => one.title), 0);
  part("left").textContent = leftOut();
  const wanted = /^#round=(\d+)$/.exec(location.hash); // page.html#round=12 opens there
  openAnswer(0, wanted ? Number(wanted[1]) - 1 : 0);
})();
