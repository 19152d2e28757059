"use strict";

// The headers of every table become buttons that sort it. Without scripts the page lacks nothing else.

for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(table.tBodies[0], headers, column));
    header.append(button);
  });
}

function sort(body, headers, column) {
  const isAscending = headers[column].ariaSort !== "ascending";
  headers.forEach((header) => header.removeAttribute("aria-sort"));
  headers[column].setAttribute("aria-sort", isAscending ? "ascending" : "descending");
  body.querySelectorAll(".heading").forEach((row) => row.remove()); // of the order in which rows were
  const rows = [...body.rows].map((row) => ({ row, key: key(row.cells[column]) }));
  rows.sort((a, b) => compare(a.key, b.key, isAscending ? 1 : -1));
  body.append(...rows.map(({ row }) => row));
}

// Numbers stand before words and empty cells last, whatever the direction.
function key(cell) {
  const text = cell.textContent.trim();
  if ("number" in cell.dataset) return { rank: 0, value: Number(cell.dataset.number) };
  return { rank: text ? 1 : 2, value: text.toLowerCase() };
}

function compare(a, b, direction) {
  if (a.rank !== b.rank) return a.rank - b.rank;
  return direction * (a.value < b.value ? -1 : a.value > b.value ? 1 : 0);
}
