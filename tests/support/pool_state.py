"""All that a pool knows, as values that can be compared."""


def books(pool):
    sequences = [(s.id, s.length, s.pages, list(s.runs)) for s in pool.sequences]
    return sequences, pool._free.listed(pool.pages), pool.holders.tolist(), pool.issue.tolist(), pool.steps, pool.usage()
