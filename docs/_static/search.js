// Search in the words of the field: synonyms of the glossary, arXiv numbers, and whole words before parts of words.
// Results are Sphinx's: [page, title, anchor, description, score, file, kind], the best last.
const SHOWN = 100;
const byScore = (a, b) => a[4] - b[4] || (a[1] < b[1] ? 1 : -1);
const wordsOf = (text) => text.replace(/([a-z\d])([A-Z])/g, "$1 $2").toLowerCase().split(/[^\p{L}\p{N}]+/u);

// A term that is a word of the page counts 5, one of its headings 15, of its title 20; a part of a word counts 1.
const stemmer = new Stemmer();
const TITLE = 20;
const termsSearch = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) =>
  termsSearch(terms, excluded).map((result) => {
    const file = Search._index.docnames.indexOf(result[0]);
    const title = wordsOf(Search._index.titles[file]).map((word) => stemmer.stemWord(word));
    const holds = (index, term) => Object.hasOwn(index, term) && [index[term]].flat().includes(file);
    const scores = [...terms].map((term) => {
      if (title.includes(term)) return TITLE;
      return holds(Search._index.titleterms, term) ? Scorer.title : holds(Search._index.terms, term) ? Scorer.term : 1;
    });
    return result.with(4, scores.reduce((sum, score) => sum + score, 0));
  });

const objectSearch = Search.performObjectSearch;
Search.performObjectSearch = (object, terms) =>
  objectSearch(object, terms).map((result) => {
    const last = result[1].split(".").pop();
    const whole = last.toLowerCase() === object || wordsOf(last).includes(object);
    return whole ? result : result.with(4, 1);
  });

// "tau" -> ["acceptance length", ...]: the query with one term of the glossary in place of another
const otherWords = (query) => {
  const text = ` ${query.toLowerCase().trim()} `;
  return SEARCH_WORDS.terms.flatMap(({ names }) =>
    names
      .filter((name) => text.includes(` ${name.toLowerCase()} `))
      .flatMap((name) => names.filter((other) => other !== name).map((other) => text.replace(name.toLowerCase(), other))),
  );
};

const known = (query) => {
  const text = query.toLowerCase().trim();
  const terms = SEARCH_WORDS.terms.filter(({ names }) => names.some((name) => name.toLowerCase() === text));
  const found = terms.map(({ names, anchor, sentence }) => ["glossary", names[0], anchor, sentence, 200]);
  const paper = SEARCH_WORDS.papers[query.match(/\d{4}\.\d{5}/)?.[0]];
  if (paper) {
    found.push(["papers", paper.title, paper.anchor, "paper", 190]);
    found.push(...paper.notebooks.map(([page, title]) => [page, title, "", "cites this paper", 180]));
  }
  return found.map((result) => [...result, "", "title"]);
};

// What is found is not marked in the sentences beside the results: Sphinx marks parts of words
const parse = Search._parseQuery;
Search._parseQuery = (query) => parse(query).with(3, new Set());

const search = Search._performSearch;
Search._performSearch = (query, ...parsed) => {
  const best = new Map();
  const add = (results, factor) => {
    for (const result of results) {
      const key = result[0] + result[2];
      const score = result[4] * factor;
      if (!best.has(key) || best.get(key)[4] < score) best.set(key, result.with(4, score));
    }
  };
  const highlighted = localStorage.getItem("sphinx_highlight_terms");
  add(known(query), 1);
  add(search(query, ...parsed), 1);
  for (const other of new Set(otherWords(query))) add(search(...Search._parseQuery(other)), 0.5);
  if (highlighted !== null) localStorage.setItem("sphinx_highlight_terms", highlighted);
  const described = (result) => result.with(3, result[3] ?? SEARCH_WORDS.pages[result[0]] ?? null);
  return [...best.values()].sort(byScore).slice(-SHOWN).map(described);
};
