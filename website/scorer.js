/* The order of the results of the search. Sphinx's own takes a page's best word; this one takes the
   mean of all words of the query, prefers guides, and puts pages about the template's making last. */
var Scorer = {
  score: ([name, title, , , score, , kind]) => {
    const making = /^(changes|chaos|contributing|crash-matrix|decisions|how-it-is-tested|measures|model)\b/;
    const reference =
      /^(api|capacity|commands|comparison|glossary|metrics|performance|protocol|settings)\b/;
    const weight = making.test(name) ? 0.3 : reference.test(name) ? 0.9 : 1;
    if (kind !== SearchResultKind.text) return weight * score;
    const { docnames, terms, titleterms } = Search._index;
    const page = docnames.indexOf(name);
    const has = (index, word) =>
      Object.hasOwn(index, word) && [index[word]].flat().includes(page);
    const [, words] = Search._parseQuery(new URLSearchParams(location.search).get("q"));
    const heading = title.toLowerCase().split(/\W+/);
    let sum = 0;
    for (const word of words) {
      if (heading.some((one) => one.startsWith(word))) sum += Scorer.pageTitle;
      else if (has(titleterms, word)) sum += Scorer.title;
      else if (has(terms, word)) sum += Scorer.term;
      else sum += Scorer.partialTerm;
    }
    return (weight * sum) / words.size;
  },
  pageTitle: 18,
  // What follows is as in Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
