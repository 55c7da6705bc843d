"""All that a pool knows, as values that can be compared."""


def books(pool):
    sequences = [(s.id, s.length, s.pages, list(s.runs)) for s in pool.sequences]
    free = [*pool._free.listed(pool.pages), *unheld(pool)]
    return sequences, free, pool.holders.tolist(), pool.issue.tolist(), pool.steps, pool.usage(), cached(pool)


def unheld(pool):
    """The free pages that are used after all others, in order."""
    return [] if pool._prefixes is None else pool._prefixes.unheld.listed().tolist()


def cached(pool):
    """The cached pages: {page: (key, writer)}."""
    if pool._prefixes is None:
        return {}
    return {page: (key, int(pool._prefixes.writers[page])) for key, page in pool._prefixes.page_of.items()}
